"""Checks wheels before anybody gets them: `check_wheel.py [--local] [--python EXE]... [--torch REQ]
WHEEL...`.

Looks into each wheel: names, metadata, files, what its module needs, size, platform tag (auditwheel), Limited
API (abi3audit), instructions for GPUs (ci/sass.py). With --python, also installs it into a fresh virtual
environment of each interpreter that it is for, imports it and runs a small benchmark on the CPU. An
interpreter that has torch lends it to the environment; else --torch says what to install; without either, the
module alone is loaded, and the output says so. --local: the wheel is for this machine, of any platform tag.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from email.message import Message
from email.parser import Parser
from functools import cached_property
from pathlib import Path

import sass
from requirements import PYPROJECT, tomllib
from set_variant import NAMES

SIZE_LIMIT = 60_000_000
# Exactly these may be needed; neither torch, Python, a driver nor a toolkit is among them.
NEEDED = re.compile(r"(libstdc\+\+|libgcc_s|libc|libm|libdl|librt|libpthread|ld-linux[\w-]*)\.so\.\d+")
CONFIG = "deep_moe/lib/cmake/deep_moe/deep_moeConfig.cmake"
FILES = (
    "deep_moe/__init__.py",
    "deep_moe/_C.pyi",
    "deep_moe/py.typed",
    "deep_moe/models.json",
    "deep_moe/_as_deep_ep/deep_ep/__init__.py",
    "deep_moe/_as_deep_ep/deep_ep_cpp.py",
    "deep_moe/include/deep_moe/buffer.hpp",
    "deep_moe/lib/libdeep_moe.a",
    CONFIG,
    "deep_moe/lib/cmake/deep_moe/deep_moeTargets.cmake",
)
PLUGIN = "deep_moe/libdeep_moe_nvshmem.so"
# The network plug-in needs NVSHMEM's host library too, which lies beside the package where pip puts it.
PLUGIN_NEEDED = re.compile(NEEDED.pattern + r"|libnvshmem_host\.so\.3")
PLUGIN_RUNPATH = "$ORIGIN/../nvidia/nvshmem/lib"
BENCH = (
    "bench --device cpu --ranks 2 --tokens 32 --ll-tokens 16 --hidden 256 --experts 8 --topk 2 "
    "--iters 2 --warmup 1"
)


class Wheel:
    """A wheel file, and what its name says."""

    def __init__(self, path: Path, local: bool) -> None:
        self.path = path
        parts = path.name.removesuffix(".whl").split("-")
        if len(parts) != 5:
            raise SystemExit(f"check_wheel.py: {path.name} is not the name of a wheel")
        self.name, self.version, self.python, self.abi, self.platform = parts
        self.name = self.name.replace("_", "-")
        if self.name not in NAMES.values():
            raise SystemExit(f"check_wheel.py: {self.name} is none of {', '.join(NAMES.values())}")
        # A wheel of `pip install .` is deep-moe, with or without CUDA.
        self.variant = None if local else next(one for one, name in NAMES.items() if name == self.name)
        self.cuda = "set(deep_moe_CUDA ON)" in self.files.get(CONFIG, b"").decode()

    @cached_property
    def files(self) -> dict[str, bytes]:
        with zipfile.ZipFile(self.path) as archive:
            return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}

    def text(self, ending: str) -> str:
        """The file of the .dist-info folder."""
        (found,) = [data for name, data in self.files.items() if name.endswith(f".dist-info/{ending}")]
        return found.decode()

    @cached_property
    def metadata(self) -> Message:
        return Parser().parsestr(self.text("METADATA"))

    def serves(self, version: tuple[int, int]) -> bool:
        """Whether CPython `version` takes it."""
        lowest = int(self.python.removeprefix("cp3"))
        return version[1] >= lowest if self.abi == "abi3" else version[1] == lowest


def tool(*command: str) -> str:
    result = subprocess.run([sys.executable, "-m", *command], text=True, capture_output=True)
    output = result.stdout + result.stderr
    return output if result.returncode == 0 else f"exit status {result.returncode}: {output}"


def check_names(wheel: Wheel) -> list[str]:
    """Names, version, licence and requirements are those of the source."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    wanted = {
        "Name": wheel.name,
        "Version": project["version"],
        "License-Expression": project["license"],
        "Requires-Python": project["requires-python"],
        "License-File": project["license-files"][0],
    }
    found = [
        f"{key} is {wheel.metadata[key]!r}, expected {value!r}"
        for key, value in wanted.items()
        if wheel.metadata[key] != value
    ]
    requirements = {
        re.sub(r"[\s()]", "", one) for one in wheel.metadata.get_all("Requires-Dist", []) if ";" not in one
    }
    expected = {one.replace(" ", "") for one in project["dependencies"]}
    if PLUGIN in wheel.files:  # the network plug-in is bound to this version
        expected.add(f"nvidia-nvshmem-{wheel.variant}<3.5,>=3.4.5")
    normal = [{",".join(sorted(re.split(",", one))) for one in group} for group in (requirements, expected)]
    if normal[0] != normal[1]:
        found.append(f"requires {sorted(requirements)}, expected {sorted(expected)}")
    return found


def check_files(wheel: Wheel) -> list[str]:
    """Everything is there, once, as RECORD says; and nothing tells where it was built."""
    found = [f"{name} is missing" for name in FILES if name not in wheel.files]
    licence = (PYPROJECT.parent / "LICENSE").read_bytes()
    if licence not in [data for name, data in wheel.files.items() if name.endswith("licenses/LICENSE")]:
        found.append("the licence is missing")
    modules = [name for name in wheel.files if re.fullmatch(r"deep_moe/_C\.\S*\.so", name)]
    suffix = "abi3" if wheel.abi == "abi3" else f"cpython-{wheel.python.removeprefix('cp')}"
    if len(modules) != 1 or not modules[0].startswith(f"deep_moe/_C.{suffix}"):
        found.append(f"modules are {modules}, expected one _C.{suffix}*.so")
    if wheel.variant is not None and wheel.cuda != (wheel.variant != "cpu"):
        found.append(f"{wheel.name} is built {'with' if wheel.cuda else 'without'} CUDA")
    if wheel.variant is not None and wheel.cuda and PLUGIN not in wheel.files:
        found.append(f"{PLUGIN} is missing")
    if wheel.cuda != ("deep_moe/lib/deep_moe/libcudart_static.a" in wheel.files):
        found.append("libcudart_static.a is missing, or in a CPU wheel")
    found += [f"{name} does not belong into a wheel" for name in wheel.files if "__pycache__" in name]

    recorded = dict(line.rsplit(",", 2)[:2] for line in wheel.text("RECORD").splitlines())
    for name, data in wheel.files.items():
        digest = "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        if recorded.get(name) != digest and not name.endswith("/RECORD"):
            found.append(f"{name} is not what RECORD says")
    for place in {str(PYPROJECT.parent), str(Path.home()) + "/"}:
        found += [f"{name} names {place}" for name, data in wheel.files.items() if place.encode() in data]
    return found


def check_size(wheel: Wheel) -> list[str]:
    size = wheel.path.stat().st_size
    return [] if size < SIZE_LIMIT else [f"{size} bytes; the limit is {SIZE_LIMIT}"]


def unpacked(wheel: Wheel, folder: Path, suffix: str) -> list[Path]:
    """The wheel's files of that suffix, but for what is not this project's."""
    names = [name for name in wheel.files if name.endswith(suffix) and "cudart" not in name]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(wheel.files[name])
    return [folder / name for name in names]


def check_needed(wheel: Wheel) -> list[str]:
    """Shared libraries need the C and C++ runtimes alone; the network plug-in NVSHMEM besides."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for library in unpacked(wheel, Path(folder), ".so"):
            text = subprocess.run(
                ["readelf", "-dW", library], check=True, text=True, capture_output=True
            ).stdout
            needed = re.findall(r"\(NEEDED\).*\[(.+)\]", text)
            is_plugin = library.name == Path(PLUGIN).name
            allowed, runpaths = (PLUGIN_NEEDED, [PLUGIN_RUNPATH]) if is_plugin else (NEEDED, [])
            bad = [name for name in needed if not allowed.fullmatch(name)]
            if bad or not needed:
                found.append(f"{library.name} needs {bad or 'nothing'}")
            paths = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", text)
            if paths != runpaths:
                found.append(f"{library.name} looks into {paths}, expected {runpaths}")
    return found


def check_platform(wheel: Wheel) -> list[str]:
    """The name says manylinux_2_28, and auditwheel finds nothing that needs more."""
    text = " ".join(tool("auditwheel", "show", str(wheel.path)).split())
    # NVSHMEM's library, which repairing leaves out, makes it say "linux": then the symbols' versions count.
    said = "constrains the platform tag to" if PLUGIN in wheel.files else "platform tag:"
    match = re.search(rf'{said} "manylinux_2_(\d+)_(\w+)"', text)
    if match is None:
        return [f"auditwheel: {text}"]
    if wheel.platform != f"manylinux_2_28_{match[2]}" or int(match[1]) > 28:
        return [f"auditwheel says manylinux_2_{match[1]}_{match[2]}, the name {wheel.platform}"]
    return []


def check_abi3(wheel: Wheel) -> list[str]:
    if wheel.abi != "abi3":
        return []
    text = tool("abi3audit", "--strict", "--report", str(wheel.path))
    try:
        results = [one for spec in json.loads(text)["specs"].values() for one in spec["wheel"]]
    except (ValueError, KeyError):
        return [f"abi3audit: {text}"]
    bad = [one for one in results if not one["result"]["is_abi3"] or one["result"]["non_abi3_symbols"]]
    return [f"abi3audit: {bad or 'it saw no module'}"] if bad or not results else []


def plain(architecture: str) -> str:
    return architecture.rstrip("af")


def check_instructions(wheel: Wheel) -> list[str]:
    """Code for the GPUs that the CMake files tell, with the instructions of sm_90 where they belong."""
    config = wheel.files[CONFIG].decode()
    told = {}
    for key in ("CUDA_ARCHITECTURES", "SM90_ARCHITECTURES"):
        match = re.search(rf'set\(deep_moe_{key} "(.*)"\)', config)
        told[key] = set(match[1].split(";")) - {""} if match else set()
    if not wheel.cuda:
        return [f"a CPU wheel has GPU code: {told}"] if any(told.values()) else []
    # "90a" is both code and PTX.
    code = {re.sub("-real$", "", one) for one in told["CUDA_ARCHITECTURES"] if not one.endswith("-virtual")}
    ptx = {re.sub("-virtual$", "", one) for one in told["CUDA_ARCHITECTURES"] if not one.endswith("-real")}
    with_sm90 = {re.sub("-real$", "", one) for one in told["SM90_ARCHITECTURES"]} & code
    found = []
    with tempfile.TemporaryDirectory() as folder:
        # The archive's objects are those of the module.
        for file in (*unpacked(wheel, Path(folder), ".so"), *unpacked(wheel, Path(folder), ".a")):
            is_plugin = file.name == Path(PLUGIN).name
            there = sass.architectures(file)
            wanted = (code, ptx)
            if is_plugin:  # linked on the device: no PTX, and older linkers call sm_90a's code sm_90
                wanted = ({plain(one) for one in code}, set())
                there = ({plain(one) for one in there[0]}, there[1])
            if there != wanted:
                found.append(f"{file.name} has code and PTX for {there}, told is {wanted}")
            elif file.suffix == ".so":
                used = sass.COPY_ENGINE if is_plugin else sass.SM90_ONLY  # its launches are never early
                names = sass.architectures(file)[0]
                new = {one for one in names if plain(one) in {plain(other) for other in with_sm90}}
                found += sass.problems(file, new, names - new, used)
    return found


CHECKS = (check_names, check_files, check_size, check_needed, check_platform, check_abi3, check_instructions)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--python", action="append", default=[], metavar="EXE")
    parser.add_argument("--torch", metavar="REQ")
    options = parser.parse_args()
    from check_install import check_install  # after the arguments: it is a file of its own for its length

    failed = 0
    for path in options.wheels:
        wheel = Wheel(path, options.local)
        print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")
        for check in CHECKS:
            if options.local and check is check_platform:
                continue
            found = check(wheel)
            failed += bool(found)
            print(f"  {'FAILED' if found else 'ok':<7} {check.__name__.removeprefix('check_')}", flush=True)
            print("".join(f"          {one}\n" for one in found), end="")
        for python in options.python:
            outcome = check_install(
                wheel.path, wheel.variant, wheel.serves, python, options.torch, BENCH.split()
            )
            failed += outcome.failed
            if outcome.text:
                print(f"  {'FAILED' if outcome.failed else 'ok':<7} {outcome.text}", flush=True)
    print(f"{len(options.wheels)} wheels, {failed} checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
