"""What a run on GPUs is made of: ranks and processes, calls, shapes of the plain copy. Needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config import NUM_SMS
from .options import BenchOptions

MAX_THREAD_RANKS = 8
CALLS_A_CHAIN = 10
GRAPH_REPEATS = 10  # chains in one CUDA graph
OVERLAP_SMS = 16
AS_TIMED = ", as timed"  # ends the names of checks of what was timed


@dataclass(frozen=True)
class Call:
    """One line of the table: steps of ``_C.BenchRank`` that make a chain.

    ``limit`` names the plain copies of the same rows: dispatch, combine, pair (one of each) or none.
    """

    name: str
    steps: tuple[str, ...]
    limit: str


@dataclass(frozen=True)
class CopyShape:
    """Warps and stages of the plain copy, and whether warps draw tokens or take them by turns."""

    warps: int
    stages: int
    tickets: bool


LAYOUT = Call("get_dispatch_layout", ("layout",), "")
DISPATCH = Call("dispatch", ("dispatch",), "dispatch")
DISPATCH_V1 = Call("dispatch, V1 calls", ("dispatch_v1",), "dispatch")
DISPATCH_BY_HANDLE = Call("dispatch by handle", ("dispatch_by_handle",), "dispatch")
COMBINE = Call("combine", ("combine",), "combine")
COMBINE_WITH_WEIGHTS = Call("combine with weights", ("combine_with_weights",), "combine")
COMBINE_ORDINARY = Call("combine, ordinary tensor", ("combine_ordinary",), "combine")
PAIR = Call("pair", ("dispatch", "combine"), "pair")
PAIR_BY_HANDLE = Call("pair by handle", ("dispatch_by_handle", "combine"), "pair")

DISPATCHES = (DISPATCH, DISPATCH_V1, DISPATCH_BY_HANDLE)
COMBINES = (COMBINE, COMBINE_WITH_WEIGHTS, COMBINE_ORDINARY)
PAIRS = (PAIR, PAIR_BY_HANDLE)
IN_GRAPHS = (DISPATCH, DISPATCH_BY_HANDLE, PAIR, PAIR_BY_HANDLE)
FROM_PYTHON = (DISPATCH, DISPATCH_BY_HANDLE, COMBINE, PAIR, PAIR_BY_HANDLE)
BY_NCCL = (DISPATCH, PAIR)

COPY_SHAPES = {
    step: [CopyShape(warps, stages, tickets) for warps, stages in shapes for tickets in (False, True)]
    for step, shapes in (("dispatch", ((6, 4), (12, 4), (16, 3))), ("combine", ((16, 3), (12, 4))))
}


def payloads(options: BenchOptions) -> tuple[str, ...]:
    """What rows are dispatched as: the run's type, and fp8 with scales where it is asked for."""
    return (options.dtype, "fp8") if options.fp8 else (options.dtype,)


def calls_of(payload: str, options: BenchOptions) -> tuple[Call, ...]:
    """The calls to time. Combine does not depend on what was dispatched, so it is timed once."""
    return (*DISPATCHES, *(() if payload == "fp8" else COMBINES), *PAIRS)


def default_gpu_ranks(gpus: int) -> int:
    """One rank a GPU; on one GPU two, which are threads of one process."""
    return gpus if gpus > 1 else 2


def complete_gpu_options(options: BenchOptions, gpus: int) -> BenchOptions:
    """Fills in processes and SMs; ValueError for ranks, or a comparison, that these GPUs cannot give.

    There is one process a rank on several GPUs, and one for all on a single GPU, which processes would share
    by time slices.
    """
    if gpus > 1 and options.ranks > gpus:
        raise ValueError(
            f"ranks: got {options.ranks}; allowed: 1 to {gpus}, one a GPU. With CUDA_VISIBLE_DEVICES=0 ranks "
            "are threads that share one GPU"
        )
    if gpus == 1 and options.ranks > MAX_THREAD_RANKS:
        raise ValueError(f"ranks: got {options.ranks}; allowed on one GPU: 1 to {MAX_THREAD_RANKS}")
    if options.compare == "nccl" and (gpus == 1 or options.ranks == 1):
        raise ValueError(
            "compare: nccl needs several GPUs, as it takes one rank a GPU; on one GPU compare with the plain "
            "copies of the same run"
        )
    processes = options.ranks if gpus > 1 else 1
    return replace(options, processes=processes, num_sms=options.num_sms or (NUM_SMS,))


def gpu_environment(options: BenchOptions) -> dict[str, str]:
    """What must be set before CUDA starts in a process whose ranks are threads.

    Code that is loaded when first used may wait for a kernel that waits for a rank that is loading it; and
    streams that share a hardware queue wait for each other. Ranks with a GPU of their own know neither.
    """
    if options.processes > 1:
        return {}
    return {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
