"""Prints requirements out of pyproject.toml, one a line: `requirements.py build test lint`.

`build` stands for the build system's requirements with CMake and Ninja, `run` for what the package needs
at run time but for torch, which the scripts choose; every other name is an extra.
"""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10: pip carries the same parser
    from pip._vendor import tomli as tomllib

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def main(names: list[str]) -> int:
    with PYPROJECT.open("rb") as file:
        table = tomllib.load(file)
    cmake = table["tool"]["scikit-build"]["cmake"]["version"]
    groups = table["project"]["optional-dependencies"] | {
        "build": [*table["build-system"]["requires"], f"cmake{cmake}", "ninja"],
        "run": [one for one in table["project"]["dependencies"] if not one.startswith("torch")],
    }
    unknown = [name for name in names if name not in groups]
    if unknown or not names:
        print(f"requirements.py: got {unknown or 'no names'}; known: {', '.join(groups)}", file=sys.stderr)
        return 1
    for name in names:
        print("\n".join(groups[name]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
