"""Which machine instructions the GPU code in a library has: `sass.py FILE...` prints them by architecture.

Takes anything that cuobjdump reads: archives, modules, object files. cuobjdump and nvdisasm are those on
PATH, else those of the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

# What came with sm_90: the bulk copy engine (UBLKCP copies, UTMACMDFLUSH ends a group), its barriers (SYNCS),
# early launches (PREEXIT lets the next kernel start, ACQBULK waits for the one in front).
COPY_ENGINE = ("UBLKCP", "UTMACMDFLUSH", "SYNCS")
SM90_ONLY = (*COPY_ENGINE, "PREEXIT", "ACQBULK")

INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)


def tools() -> tuple[str, dict[str, str]]:
    """cuobjdump, and an environment in which it finds nvdisasm."""
    folders = os.environ["PATH"].split(os.pathsep)
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        folders += [str(path) for path in sorted(Path(root).glob("*/bin"))]
    path = os.pathsep.join(folders)
    found = shutil.which("cuobjdump", path=path)
    if found is None or shutil.which("nvdisasm", path=path) is None:
        raise FileNotFoundError(
            "no cuobjdump and nvdisasm: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )
    return found, os.environ | {"PATH": path}


def cuobjdump(*arguments: str | Path) -> str:
    program, env = tools()
    command = [program, *map(str, arguments)]
    return subprocess.run(command, env=env, check=True, text=True, capture_output=True).stdout


def architectures(file: Path) -> tuple[set[str], set[str]]:
    """Of the machine code and of the PTX in `file`: ({"80", "90a"}, {"90"})."""
    code = re.findall(r"\.sm_(\w+)\.cubin$", cuobjdump("-lelf", file), re.MULTILINE)
    ptx = re.findall(r"\.sm_(\w+)\.ptx$", cuobjdump("-lptx", file), re.MULTILINE)
    return set(code), set(ptx)


def instructions(file: Path, architecture: str) -> Counter[str]:
    """How often each instruction, without its suffixes, is in the code for one architecture."""
    return Counter(INSTRUCTION.findall(cuobjdump("-sass", "-arch", f"sm_{architecture}", file)))


def problems(
    file: Path, with_sm90: set[str], without: set[str], wanted: tuple[str, ...] = SM90_ONLY
) -> list[str]:
    """What is wrong with `file`: each of `wanted` has to be in the code of the architectures `with_sm90`, and
    none of SM90_ONLY in that of `without`."""
    found = []
    for architecture in sorted(with_sm90 | without):
        counts = instructions(file, architecture)
        if sum(counts.values()) < 100:
            found.append(f"sm_{architecture}: {sum(counts.values())} instructions; that is no kernel library")
        elif architecture in without:
            there = [f"{name} ({counts[name]})" for name in SM90_ONLY if counts[name]]
            found += [f"sm_{architecture} has {name}, which it must not" for name in there]
        else:
            found += [f"sm_{architecture} has no {name}" for name in wanted if not counts[name]]
    return found


def main(files: list[str]) -> int:
    for name in files:
        code, ptx = architectures(Path(name))
        print(f"{name}: code {' '.join(sorted(code))}; PTX {' '.join(sorted(ptx))}")
        for architecture in sorted(code):
            counts = instructions(Path(name), architecture)
            told = ", ".join(f"{one} {counts[one]}" for one in SM90_ONLY)
            print(f"  sm_{architecture}: {sum(counts.values())} instructions; {told}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: sass.py FILE...")
    sys.exit(main(sys.argv[1:]))
