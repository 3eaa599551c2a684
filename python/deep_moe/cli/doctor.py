"""``deep-moe doctor``: one line for each thing that this build and this machine can or cannot do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import _variants
from ..tuning import cpu_model
from . import probes
from .findings import Finding
from .machine import build_info, memory_bytes, num_cores
from .network import find_network

TORCH_FLOOR = (2, 4)
NVSHMEM_RANGE = ">=3.4.5,<3.5"
NVSHMEM_FLOOR, NVSHMEM_CEILING = (3, 4, 5), (3, 5)


def version_numbers(text: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: (2, 13, 0) of ``2.13.0+cpu``."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def find_build(info: dict[str, Any]) -> list[Finding]:
    """Describes the package and its native module."""
    from .. import __version__

    python = f"Python {sys.version.split()[0]}"
    abi = (
        "abi3 (one module for Python 3.12 and later)"
        if info["abi3"]
        else str(sysconfig.get_config_var("SOABI"))
    )
    findings = [
        Finding(
            "ok",
            "package",
            f"deep_moe {__version__}, variant {info['variant']}, built with {info['compiler']}",
        ),
        Finding("ok", "python", f"{python}, native module: {abi}"),
    ]
    if str(info["version"]) != __version__:
        findings.append(
            Finding(
                "warning",
                "versions",
                f"native module {info['version']}, Python files {__version__}",
                "install again: pip install --force-reinstall .",
            )
        )
    both = _variants.conflict(Path(_variants.__file__).parent, info["variant"])
    if both is not None:
        findings.append(Finding("warning", "wheels", *both))
    return findings


def find_torch() -> list[Finding]:
    """Describes torch and its gloo backend."""
    import torch
    import torch.distributed as dist

    low = version_numbers(torch.__version__) < TORCH_FLOOR
    wanted = ".".join(str(part) for part in TORCH_FLOOR)
    findings = [
        Finding(
            "warning" if low else "ok",
            "torch",
            torch.__version__,
            f"pip install 'torch>={wanted}'" if low else "",
        )
    ]
    if dist.is_available() and dist.is_gloo_available():
        findings.append(Finding("ok", "gloo", "torch.distributed has gloo (the bench joins its ranks by it)"))
    else:
        findings.append(
            Finding(
                "missing",
                "gloo",
                "this torch has no gloo backend",
                "install a torch built with distributed; deep_moe itself also takes comm= (mpi4py)",
            )
        )
    return findings


def find_cpu(info: dict[str, Any]) -> list[Finding]:
    """Describes the processor, its memory, and what the library's loops use of it."""
    cores = num_cores()
    total, free = memory_bytes("MemTotal"), memory_bytes("MemAvailable")
    return [
        Finding(
            "ok", "processor", f"{cpu_model()}, {cores} {'core' if cores == 1 else 'cores'} for this process"
        ),
        Finding("ok", "simd", f"sums and casts use {info['simd']}"),
        Finding("ok", "memory", f"{total / 1e9:.1f} GB, {free / 1e9:.1f} GB free")
        if total
        else Finding("warning", "memory", "the size of the memory is unknown here"),
    ]


def find_shared_memory() -> list[Finding]:
    """Tries what the CPU backend needs of the system."""
    findings = []
    problem = probes.try_shared_memory()
    findings.append(
        Finding("ok", "shared memory", "memfd created, filled, passed over a socket and mapped")
        if not problem
        else Finding(
            "missing",
            "shared memory",
            problem,
            "rank processes need memfd and SCM_RIGHTS: Linux 3.17 or later, and a sandbox that lets them by",
        )
    )
    setting = probes.huge_page_setting()
    enabled = setting in ("always", "advise", "within_size")
    findings.append(
        Finding("ok", "huge pages", f"transparent huge pages for shared memory: {setting}")
        if enabled
        else Finding(
            "warning",
            "huge pages",
            f"transparent huge pages for shared memory: {setting or 'not offered'}",
            f"large buffers may gain by: echo advise > {probes.HUGE_PAGE_FILE} (as root)" if setting else "",
        )
    )
    return findings


def find_backend() -> list[Finding]:
    """Runs the CPU backend for real."""
    problem = probes.try_cpu_backend()
    if problem:
        advice = "see the lines above; if they are all ok, report this with the whole output"
        return [Finding("missing", "cpu backend", problem, advice)]
    return [
        Finding("ok", "cpu backend", "two ranks have dispatched and combined rows, and the sums are right")
    ]


def find_cuda(info: dict[str, Any]) -> list[Finding]:
    """Describes the CUDA side of the build, the driver and the GPUs."""
    findings = []
    if info["cuda_compiled"]:
        archs = info["cuda_archs"]
        archs = archs if isinstance(archs, str) else ", ".join(archs)
        findings.append(Finding("ok", "cuda build", f"compiled in, for {archs}"))
        if not info.get("cuda_transport", False):
            findings.append(
                Finding(
                    "missing",
                    "cuda transport",
                    "this version moves no tokens between GPUs",
                    "use device='cpu'",
                )
            )
    else:
        findings.append(
            Finding(
                "missing",
                "cuda build",
                "this build has no CUDA code",
                "install a CUDA variant, or install nvcc and run pip install . again (not needed on the CPU)",
            )
        )
    driver = probes.probe_cuda()
    if driver.problem:
        return [
            *findings,
            Finding("missing", "cuda driver", driver.problem, "install NVIDIA's driver to use GPUs"),
        ]
    findings.append(
        Finding("ok", "cuda driver", f"for CUDA {driver.version // 1000}.{driver.version % 1000 // 10}")
    )
    if not driver.gpus:
        return [
            *findings,
            Finding(
                "missing", "gpus", "the driver shows none", "look at nvidia-smi and CUDA_VISIBLE_DEVICES"
            ),
        ]
    findings.append(Finding("ok", "gpus", ", ".join(f"{i}: {name}" for i, name in enumerate(driver.gpus))))
    if driver.blocked:
        pairs = ", ".join(f"{a}-{b}" for a, b in driver.blocked)
        findings.append(
            Finding("warning", "peer access", f"not between GPUs {pairs}", "look at nvidia-smi topo -p2p r")
        )
    elif len(driver.gpus) > 1:
        findings.append(Finding("ok", "peer access", "between all GPUs"))
    return findings


def find_nvshmem(info: dict[str, Any]) -> list[Finding]:
    """Looks for the NVSHMEM package, which only exchanges between nodes need."""
    cuda = "12" if info["variant"] == "cu12" else "13"
    for package in ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        numbers = version_numbers(version)
        if numbers >= NVSHMEM_FLOOR and numbers[:2] < NVSHMEM_CEILING:
            return [Finding("ok", "nvshmem", f"{package} {version}")]
        return [
            Finding(
                "warning",
                "nvshmem",
                f"{package} {version}, outside {NVSHMEM_RANGE}",
                f"pip install '{package}{NVSHMEM_RANGE}'",
            )
        ]
    advice = f"pip install 'nvidia-nvshmem-cu{cuda}{NVSHMEM_RANGE}' (only to exchange between nodes)"
    return [Finding("missing", "nvshmem", "no package found", advice)]


def find_limits() -> list[Finding]:
    """Reads the limits of this process that buffers and the network may run into."""
    files, locked = probes.limit("RLIMIT_NOFILE"), probes.limit("RLIMIT_MEMLOCK")
    low_files, low_locked = 0 <= files < 1024, 0 <= locked < 64 << 20
    return [
        Finding(
            "warning" if low_files else "ok",
            "open files",
            "no limit" if files < 0 else f"up to {files}",
            "each segment of each peer is an open file: ulimit -n 4096" if low_files else "",
        ),
        Finding(
            "warning" if low_locked else "ok",
            "locked memory",
            "no limit" if locked < 0 else f"up to {locked / 2**20:,.1f} MiB",
            "network cards may need more: ulimit -l unlimited (the CPU does not)" if low_locked else "",
        ),
    ]


def find_extras() -> list[Finding]:
    """Looks for the optional Python packages."""
    wanted = (("matplotlib", "deep-moe bench --plot"), ("mpi4py", "Buffer(comm=...)"))
    findings = []
    for package, use in wanted:
        if importlib.util.find_spec(package) is None:
            findings.append(Finding("missing", package, f"optional, for {use}", f"pip install {package}"))
        else:
            findings.append(Finding("ok", package, f"{_version(package)}, for {use}"))
    return findings


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def find_all(info: dict[str, Any]) -> list[Finding]:
    """Returns all lines; a probe that breaks becomes a line of its own."""
    parts: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("package", lambda: find_build(info)),
        ("torch", find_torch),
        ("processor", lambda: find_cpu(info)),
        ("shared memory", find_shared_memory),
        ("cpu backend", find_backend),
        ("cuda", lambda: find_cuda(info)),
        ("nvshmem", lambda: find_nvshmem(info)),
        ("network", lambda: find_network(info)),
        ("limits", find_limits),
        ("extras", find_extras),
    ]
    findings = []
    for name, part in parts:
        try:
            findings += part()
        except Exception as error:
            findings.append(
                Finding("missing", name, f"could not be looked at: {type(error).__name__}: {error}")
            )
    return findings


def run_doctor() -> bool:
    """Prints all lines and returns whether the CPU backend works."""
    from rich.console import Console
    from rich.text import Text

    colours = {"ok": "green", "warning": "yellow", "missing": "red"}
    console = Console(highlight=False)
    findings = find_all(build_info())
    for finding in findings:
        text = Text(finding.line())
        text.stylize(colours[finding.mark], 0, len(finding.mark))
        console.print(text, soft_wrap=True)
    return any(finding.name == "cpu backend" and finding.mark == "ok" for finding in findings)
