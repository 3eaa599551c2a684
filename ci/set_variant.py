"""Makes a copy of the source tree that of one wheel variant: `set_variant.py TREE cpu|cu12|cu13 [nvshmem]`.

The three wheels have one source and one version; pyproject.toml cannot say a name that changes, so the name
and the variant's own dependencies are written into the copy; with `nvshmem` that of the network plug-in too.
"""

import re
import sys
from pathlib import Path

NAMES = {"cpu": "deep-moe", "cu12": "deep-moe-cu12", "cu13": "deep-moe-cu13"}
# The internode plug-in is compiled against it; from 3.5 on its queue pairs are laid out otherwise.
NVSHMEM = "nvidia-nvshmem-{variant}>=3.4.5,<3.5"


def replace_once(pattern: str, new: str, text: str) -> str:
    found = re.findall(pattern, text, re.MULTILINE)
    if len(found) != 1:
        raise SystemExit(
            f"set_variant.py: {pattern!r} is in pyproject.toml {len(found)} times; once is needed"
        )
    return re.sub(pattern, new, text, count=1, flags=re.MULTILINE)


def main(tree: Path, variant: str, with_plugin: bool) -> None:
    if variant not in NAMES:
        raise SystemExit(f"set_variant.py: variant is {variant!r}; allowed: {', '.join(NAMES)}")
    file = tree / "pyproject.toml"
    if (tree / ".git").exists():
        raise SystemExit(f"set_variant.py: {tree} is a working tree; give a copy of it")
    text = replace_once(r'^name = "deep-moe"$', f'name = "{NAMES[variant]}"', file.read_text())
    if variant != "cpu" and with_plugin:
        text = replace_once(
            r"^dependencies = \[(.+)\]$", rf'dependencies = [\1, "{NVSHMEM.format(variant=variant)}"]', text
        )
    file.write_text(text)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or sys.argv[3:] not in ([], ["nvshmem"]):
        raise SystemExit("usage: set_variant.py TREE VARIANT [nvshmem]")
    main(Path(sys.argv[1]), sys.argv[2], len(sys.argv) == 4)
