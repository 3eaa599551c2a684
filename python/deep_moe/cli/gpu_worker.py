"""A process of a run on GPUs: one rank, or all ranks as threads. Orders and events as in ``worker``."""

from __future__ import annotations

import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .worker import Emit, run_as_process

if TYPE_CHECKING:
    from .gpu_world import World
    from .inputs import Inputs
    from .options import BenchOptions

BUFFER_TIMEOUT = 20.0
ROOM = 6  # worst cases of received rows beside those of a chain


def run_process(index: int, options_json: str, folder: Path, emit: Emit) -> dict[str, Any]:
    """Runs the ranks of this process and returns their results."""
    import torch

    from .options import BenchOptions

    options = BenchOptions.from_json(options_json)
    torch.set_num_threads(1)
    emit({"phase": "start CUDA"})
    if options.processes > 1:
        return {"ranks": [_run_alone(index, options, folder, emit)]}
    return {"ranks": _run_threads(options, folder, emit)}


def _run_alone(rank: int, options: BenchOptions, folder: Path, emit: Emit) -> dict[str, Any]:
    import torch.distributed as dist

    from ..comm import comm_of

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=options.timeout),
    )
    try:
        return _run_rank(rank, rank, options, folder, comm_of(dist.group.WORLD, None), emit)
    finally:
        dist.destroy_process_group()


def _run_threads(options: BenchOptions, folder: Path, emit: Emit) -> list[dict[str, Any]]:
    from ..comm import thread_comms

    comms = thread_comms(options.ranks, timeout=options.timeout)
    results: list[dict[str, Any]] = [{} for _ in comms]
    failures: list[str] = []
    failed = threading.Event()

    def work(rank: int) -> None:
        try:
            results[rank] = _run_rank(rank, 0, options, folder, comms[rank], emit)
        except BaseException as error:
            failures.append(f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}")
            failed.set()

    threads = [
        threading.Thread(target=work, args=(rank,), daemon=True, name=f"rank {rank}")
        for rank in range(options.ranks)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not failed.wait(0.2):
        pass
    if failed.is_set():
        for thread in threads:
            thread.join(BUFFER_TIMEOUT / 10)  # what the others say belongs to the report
        raise RuntimeError("\n".join(failures))
    return results


def _run_rank(
    rank: int, device_index: int, options: BenchOptions, folder: Path, comm: Any, emit: Emit
) -> dict[str, Any]:
    import torch

    from .gpu_world import World, warm_stream
    from .timing import SharedBarrier

    device = torch.device("cuda", device_index)
    torch.cuda.set_device(device)
    stream, side = warm_stream(), warm_stream(priority=-1)
    barrier = SharedBarrier(folder / "barrier", rank, options.ranks, options.timeout)
    world = World(rank, options.ranks, device, comm, barrier, side, options.processes > 1, emit)
    with torch.cuda.stream(stream):
        return run_jobs(world, options)


def run_jobs(world: World, options: BenchOptions) -> dict[str, Any]:
    """Everything that one rank measures; its stream is current."""
    from .gpu_low_latency import run_low_latency
    from .inputs import make_inputs

    world.phase("make the inputs")
    inputs = make_inputs(options, world.rank, world.device)
    results: dict[str, Any] = {"lines": [], "checks": [], "overlap": [], "host_cost": []}
    results |= {"low_latency": [], "hook_overlap": [], "expert_major": []}
    parts = []
    if "ht" in options.modes:
        parts.append(run_high_throughput(world, options, inputs))
    if "ll" in options.modes:
        parts.append(run_low_latency(world, options, inputs))
    for part in parts:
        for key, values in part.items():
            results[key] += values
    return results


def run_high_throughput(world: World, options: BenchOptions, inputs: Inputs) -> dict[str, Any]:
    """The high-throughput part of it."""
    from dataclasses import asdict

    from ..buffer import Buffer
    from .gpu_expert_major import ExpertMajor
    from .gpu_extras import Overlap, host_cost
    from .gpu_jobs import ExchangeJob, check_layers
    from .gpu_plan import CALLS_A_CHAIN, payloads

    world.phase("open the buffer")
    rows = options.ranks * options.tokens * (options.row_bytes + 1024)
    buffer = Buffer(
        None,
        (CALLS_A_CHAIN + ROOM) * rows,
        comm=world.comm,
        device=world.device,
        explicitly_destroy=True,
        timeout=min(BUFFER_TIMEOUT, options.timeout),
    )
    nccl = _nccl_group() if options.compare == "nccl" else None
    checks, lines = [], []
    if options.check:
        world.phase("check whole layers")
        checks += check_layers(world, options, inputs, buffer)
    for payload in payloads(options):
        job = ExchangeJob(world, options, inputs, buffer, payload)
        job.time_all(nccl)
        checks += job.checks
        lines += job.lines
        world.at_rest()
        del job
    overlap = Overlap(world, options, inputs, buffer).measure() if options.overlap else []
    costs = host_cost(world, options, inputs, buffer) if options.host_cost else []
    by_expert = ExpertMajor(world, options, inputs, buffer).measure() if options.expert_major else []
    world.phase("close the buffer")
    world.at_rest()
    buffer.destroy()
    return {
        "lines": [asdict(line) for line in lines],
        "checks": [check.to_dict() for check in checks],
        "overlap": overlap,
        "host_cost": costs,
        "expert_major": by_expert,
    }


def _nccl_group() -> Any:
    import torch.distributed as dist

    return dist.new_group(backend="nccl")


def main() -> None:
    """Entry of the process."""
    run_as_process(run_process)


if __name__ == "__main__":
    main()
