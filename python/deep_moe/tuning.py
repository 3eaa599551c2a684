"""Tuning files: what ``deep-moe tune`` has measured, and what of it fits here.

A file is JSON, ``{"schema": 1, "entries": [...]}``, an entry for each hardware, number of ranks, hidden size
and element type. ``DEEP_MOE_TUNING_FILE`` names it (empty: none), else it is ``deep_moe/tuning.json`` in the
user's configuration folder. It is read once a process. A file that cannot be used gives one warning and the
built-in values, never an error.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from ._C import build_info

__all__ = ["Entry", "choose", "cpu_model", "hardware", "num_sms", "read", "store", "tuning_file"]

SCHEMA = 1
VARIABLE = "DEEP_MOE_TUNING_FILE"
SLACK = 0.02
CALLS = ("dispatch", "combine")
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8"}


@dataclass(frozen=True)
class Entry:
    """What was chosen for one kind of work.

    Attributes:
        hardware: a GPU's name as CUDA gives it, or a processor's.
        ranks: ranks of the group.
        hidden: elements a row.
        dtype: of dispatched rows: bf16, fp16, fp32 or fp8.
        ranks_per_gpu: 1; more where ranks were threads that share a GPU; 0 on the CPU.
        dispatch_sms, combine_sms: SMs a rank, None where they were not measured.
        cpu_threads: for ``DEEP_MOE_CPU_THREADS``, None on GPUs.
        about: date, version, shape and times of the measurement; only for readers.
    """

    hardware: str
    ranks: int
    hidden: int
    dtype: str
    ranks_per_gpu: int = 1
    dispatch_sms: int | None = None
    combine_sms: int | None = None
    cpu_threads: int | None = None
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, int, str, int]:
        """What an entry is about; a later one replaces an earlier one of the same key."""
        return self.hardware, self.ranks, self.hidden, self.dtype, self.ranks_per_gpu


def choose(times: Mapping[int, float], slack: float = SLACK) -> int:
    """The smallest number whose time is within ``slack`` of the best time."""
    if not times:
        raise ValueError("times: got none; give the time of at least one number")
    best = min(times.values())
    return min(number for number, time in times.items() if time <= best * (1 + slack))


# ---- the file ----
def tuning_file() -> Path | None:
    """Where the tuning file is, whether it exists or not; None where there is to be none."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    folder = os.environ.get("XDG_CONFIG_HOME")
    try:
        return (Path(folder) if folder else Path.home() / ".config") / "deep_moe" / "tuning.json"
    except RuntimeError:  # a user without a home
        return None


def read(path: Path) -> list[Entry]:
    """The entries of a file; ValueError or OSError for one that cannot be used."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, no JSON, or nested too deeply
        raise ValueError(f"{path}: not JSON: {error}") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{path}: schema {schema!r}, this version of deep_moe reads {SCHEMA}")
    entries = document.get("entries")
    if not isinstance(entries, list):
        raise ValueError(f"{path}: no list of entries")
    return [_entry(item, f"{path}: entry {index}") for index, item in enumerate(entries)]


def _entry(item: Any, where: str) -> Entry:
    """An entry that has been looked at; fields that are not known are left out."""
    if not isinstance(item, dict):
        raise ValueError(f"{where}: no object")
    known = {one.name for one in fields(Entry)}
    try:
        entry = Entry(**{name: value for name, value in item.items() if name in known})
    except TypeError:
        raise ValueError(f"{where}: hardware, ranks, hidden and dtype are needed") from None
    for name in ("hardware", "dtype"):
        if not isinstance(getattr(entry, name), str):
            raise ValueError(f"{where}: {name} is no text")
    for name, lowest in (("ranks", 1), ("hidden", 1), ("ranks_per_gpu", 0)):
        if not _is_number(getattr(entry, name), lowest):
            raise ValueError(f"{where}: {name} is no number from {lowest}")
    for name in ("dispatch_sms", "combine_sms", "cpu_threads"):
        value = getattr(entry, name)
        if value is not None and not _is_number(value, 1, 1024):
            raise ValueError(f"{where}: {name} is no number from 1 to 1024")
    return entry


def _is_number(value: Any, lowest: int, highest: int = 1 << 31) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest


def store(path: Path, entries: Sequence[Entry]) -> None:
    """Puts entries into a file, in place of those with the same keys; others in it stay.

    The file is replaced as a whole: a reader sees the old one or the new one. ValueError where there is a
    file that :func:`read` refuses; it is left as it is.
    """
    kept = {entry.key: entry for entry in (read(path) if path.exists() else [])}
    kept |= {entry.key: entry for entry in entries}
    document = {"schema": SCHEMA, "entries": [asdict(entry) for entry in kept.values()]}
    path = path.resolve()  # a link stays one
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(document, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@functools.cache
def _load(path: Path, must_exist: bool) -> tuple[Entry, ...]:
    """Once a process and path, so that the warning comes once too."""
    try:
        if not must_exist and not path.exists():
            return ()
        return tuple(read(path))
    except (OSError, ValueError) as error:
        said = f"{path}: {error.strerror}" if isinstance(error, OSError) else str(error)
        warnings.warn(f"tuning file {said}; built-in values are used", RuntimeWarning, stacklevel=4)
        return ()


# ---- what fits here ----
def num_sms(
    call: str, num_ranks: int, hidden: int | None = None, dtype: torch.dtype | str | None = None
) -> int | None:
    """SMs a rank for ``dispatch`` or ``combine`` on this hardware by the tuning file, or None without a fit.

    Args:
        call: "dispatch" or "combine".
        num_ranks: ranks of the group.
        hidden: elements a row. None: of any size; the most SMs of all that fit, so that no size is slower
            than it was measured to be.
        dtype: of dispatched rows, a torch.dtype or a name such as "bf16". None: of any.
    """
    if call not in CALLS:
        raise ValueError(f"call: got {call!r}; allowed are {', '.join(CALLS)}")
    path = tuning_file()
    entries = _load(path, VARIABLE in os.environ) if path is not None else ()
    if not entries:
        return None
    name = DTYPES.get(dtype, str(dtype)) if isinstance(dtype, torch.dtype) else dtype
    here = hardware()
    found = [
        number
        for entry in entries
        if (entry.hardware, entry.ranks) == (here, num_ranks)
        and hidden in (None, entry.hidden)
        and name in (None, entry.dtype)
        and (entry.ranks_per_gpu <= 1 or _ranks_are_threads())
        and (number := getattr(entry, f"{call}_sms")) is not None
    ]
    return max(found, default=None)


def hardware() -> str | None:
    """The current GPU's name, or the processor's where there is no GPU that this build serves.

    None where it is not known. Starts no CUDA, which a program may want to do later, or in a forked process.
    """
    if not build_info()["cuda_transport"]:
        return cpu_model()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        try:
            return _gpu_name(torch.cuda.current_device())
        except RuntimeError:  # forked from a process that used CUDA
            pass
    names = _gpu_models()
    if not names:
        return cpu_model()
    return names[0] if len(set(names)) == 1 else None


@functools.cache
def _gpu_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


@functools.cache
def _gpu_models() -> tuple[str, ...]:
    """Names of the machine's GPUs by the driver's files, which need no CUDA."""
    names = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Model:"):
                names.append(line.split(":", 1)[1].strip())
    return tuple(names)


@functools.cache
def _ranks_are_threads() -> bool:
    """Whether this is the only process of its program, on one GPU: its ranks share that."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    one = len(visible.split(",")) == 1 if visible else len(_gpu_models()) == 1
    return one and os.environ.get("WORLD_SIZE", "1") == "1"


@functools.cache
def cpu_model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith(("model name", "cpu model", "hardware")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
