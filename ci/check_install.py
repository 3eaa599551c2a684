"""Installs a wheel into a fresh virtual environment and uses it; part of ci/check_wheel.py."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# The module by itself, without torch and the package around it. Prints what it is and what came with it.
LOAD_MODULE = """
import importlib.machinery, importlib.util, json, re, sys, sysconfig
from pathlib import Path
(file,) = Path(sysconfig.get_path("platlib"), "deep_moe").glob("_C.*.so")
loader = importlib.machinery.ExtensionFileLoader("deep_moe._C", str(file))
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("deep_moe._C", loader))
loader.exec_module(module)
maps = Path("/proc/self/maps").read_text()
mapped = set(re.findall(r"/(lib(?:cuda|cudart|torch|nvshmem)[\\w.-]*)$", maps, re.M))
print(json.dumps({"info": module.build_info(), "mapped": sorted(mapped)}))
"""

IMPORT_PACKAGE = """
import json, warnings
warnings.simplefilter("error")
import torch
import deep_moe
print(json.dumps({"version": deep_moe.__version__, "torch": torch.__version__}))
"""


@dataclass
class Outcome:
    """What became of one interpreter; no text: the wheel is not for it."""

    text: str
    failed: bool = False


class Environment:
    """A virtual environment in `folder`."""

    def __init__(self, folder: Path, python: str) -> None:
        self.bin = folder / "bin"
        subprocess.run([python, "-m", "venv", folder], check=True)
        self.env = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "VIRTUAL_ENV": str(folder)}
        for name in ("PYTHONPATH", "PYTHONHOME"):
            self.env.pop(name, None)

    def run(self, program: str, *arguments: str | Path) -> str:
        """Its standard output; RuntimeError with all of its output if it fails."""
        command = [str(self.bin / program), *map(str, arguments)]
        result = subprocess.run(
            command, env=self.env, cwd=self.bin, text=True, capture_output=True, timeout=600
        )
        if result.returncode != 0:
            output = result.stdout + result.stderr
            raise RuntimeError(f"{' '.join(command)}: exit status {result.returncode}\n{output}")
        return result.stdout

    def borrow(self, folder: str) -> None:
        """Sees what is installed in another environment's site-packages."""
        own = self.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        Path(own, "borrowed.pth").write_text(folder + "\n")


def use(
    environment: Environment, wheel: Path, variant: str | None, with_torch: bool, lent: bool, bench: list[str]
) -> str:
    """Installs and uses the wheel; what was seen, or RuntimeError."""
    if with_torch:
        environment.run("python", "-m", "pip", "install", "-q", wheel)
    # Whatever deep_moe the lender has: this one.
    environment.run("python", "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", wheel)
    seen = json.loads(environment.run("python", "-c", LOAD_MODULE))
    info = seen["info"]
    if variant not in (None, info["variant"]):
        raise RuntimeError(f"the module's variant is {info['variant']}")
    if seen["mapped"]:
        raise RuntimeError(f"the module brought {seen['mapped']} with it")
    if info["abi3"] != ("-abi3-" in wheel.name):
        raise RuntimeError(f"abi3 is {info['abi3']} in {wheel.name}")
    cmake = "deep_moe/lib/cmake/deep_moe/deep_moeConfig.cmake"
    if not with_torch:
        return "module loads; no torch for this interpreter, so the package was not imported (--torch REQ)"
    told = json.loads(environment.run("python", "-c", IMPORT_PACKAGE))
    folder = environment.run("python", "-m", "deep_moe", "--cmake-dir").strip()
    if not folder.endswith(str(Path(cmake).parent)) or not Path(folder, "deep_moeConfig.cmake").is_file():
        raise RuntimeError(f"--cmake-dir says {folder}")
    environment.run("deep-moe", "doctor")
    table = environment.run("deep-moe", *bench)
    if "dispatch" not in table.lower():
        raise RuntimeError(f"the benchmark printed\n{table}")
    whose = " (lent)" if lent else ""
    return f"torch {told['torch']}{whose}: import, --cmake-dir, doctor, bench"


def check_install(
    wheel: Path,
    variant: str | None,
    serves: Callable[[tuple[int, int]], bool],
    python: str,
    torch: str | None,
    bench: list[str],
) -> Outcome:
    """Installs `wheel` into an environment of interpreter `python`, if it is for that."""
    probe = (
        "import importlib.util as u, json, sys, sysconfig; print(json.dumps([sys.version_info[:2], "
        "u.find_spec('torch') is not None, sysconfig.get_path('purelib')]))"
    )
    answer = subprocess.run([python, "-c", probe], check=True, text=True, capture_output=True).stdout
    version, has_torch, site = json.loads(answer)
    if not serves((version[0], version[1])):
        return Outcome("")
    name = f"Python {version[0]}.{version[1]}"
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment(Path(folder).resolve() / "venv", python)
        try:
            if has_torch:
                environment.borrow(site)
            elif torch:
                environment.run("python", "-m", "pip", "install", "-q", torch)
            with_torch = has_torch or torch is not None
            seen = use(environment, wheel.resolve(), variant, with_torch, has_torch, bench)
            return Outcome(f"{name}: {seen}")
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            return Outcome(f"{name}: {error}", failed=True)
