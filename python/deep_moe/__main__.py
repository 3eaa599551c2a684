"""``python -m deep_moe``: the command line, and the folders that a C++ build needs.

``--cmake-dir`` prints the folder to give to CMake as ``deep_moe_DIR`` and ``--include-dir`` that of the
headers.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDERS = {"--cmake-dir": Path("lib", "cmake", "deep_moe"), "--include-dir": Path("include")}


def find_folder(folder: Path) -> Path | None:
    """Returns ``folder`` inside the installed package, or None where this installation lacks it."""
    import deep_moe

    for root in deep_moe.__path__:
        if (Path(root) / folder).is_dir():
            return (Path(root) / folder).resolve()
    return None


def main(arguments: list[str]) -> int:
    """Prints the folders asked for, or hands all arguments to the command line."""
    if not arguments or not set(arguments) <= set(FOLDERS):
        from deep_moe.cli import main as run_command_line

        return run_command_line(arguments)
    for argument in arguments:
        found = find_folder(FOLDERS[argument])
        if found is None:
            print(
                f"deep_moe: {argument}: this installation has no {FOLDERS[argument]}; "
                "install the package (not only its Python sources) with pip install .",
                file=sys.stderr,
            )
            return 1
        print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
