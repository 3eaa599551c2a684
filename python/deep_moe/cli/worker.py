"""A rank process of the bench: orders come by argv, events leave as JSON lines on standard output."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

Emit = Callable[[dict[str, Any]], None]

TICK_SECONDS = 0.1


def event_channel() -> Emit:
    """Takes standard output for events alone (other prints go to standard error) and returns the writer."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    lock = threading.Lock()

    def emit(event: dict[str, Any]) -> None:
        with lock:
            channel.write(json.dumps(event) + "\n")

    return emit


def die_with_parent() -> None:
    """Ends this process when its standard input closes, as it does however the parent ends."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Ticker:
    """Called ``total`` times, reports progress at most ten times a second."""

    def __init__(self, emit: Emit, total: int) -> None:
        self.total = total
        self._emit, self._done, self._last = emit, 0, 0.0

    def __call__(self) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._last >= TICK_SECONDS or self._done == self.total:
            self._last = now
            self._emit({"done": self._done, "total": self.total})


def run_rank(rank: int, options_json: str, folder: Path, emit: Emit) -> dict[str, Any]:
    """Runs all jobs of ``rank`` and returns its chains and checks."""
    import torch
    import torch.distributed as dist

    from .options import BenchOptions

    options = BenchOptions.from_json(options_json)
    emit({"phase": "join the process group"})
    torch.set_num_threads(1)
    device = torch.device("cpu")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=options.timeout),
    )
    try:
        return _run_jobs(options, rank, device, folder, emit)
    finally:
        dist.destroy_process_group()


def _run_jobs(options: Any, rank: int, device: Any, folder: Path, emit: Emit) -> dict[str, Any]:
    import torch.distributed as dist

    from .chains import ROUNDS, time_chains
    from .exchange_jobs import HtJob, LlJob
    from .experts import ExpertBank, local_experts
    from .inputs import make_inputs
    from .jobs import Context, GlooJob, Job, LayerJob
    from .timing import CopyBuffers, SharedBarrier, StepTimer, split_rounds

    emit({"phase": "make the inputs"})
    inputs = make_inputs(options, rank, device)
    mine = local_experts(rank, options.ranks, options.experts)
    bank = ExpertBank(mine, options.hidden, options.ffn, options.seed, device)
    emit({"phase": "open the buffer"})
    buffer = open_buffer(options, dist.group.WORLD)
    barrier = SharedBarrier(folder / "barrier", rank, options.ranks, options.timeout)
    context = Context(options, rank, device, inputs, bank, buffer, CopyBuffers(device))
    jobs: list[Job] = []
    if "ht" in options.modes:
        jobs += [LayerJob(context), HtJob(context)]
        jobs += [HtJob(context, fp8=True)] if options.fp8 else []
    if "ll" in options.modes:
        jobs += [LlJob(context)]
        jobs += [LlJob(context, fp8=True)] if options.can_fp8 else []
    if options.compare == "gloo":
        jobs.append(GlooJob(context))
    checks = []
    for job in jobs if options.check else []:
        emit({"phase": f"check {job.name}"})
        checks += job.check()
    emit({"phase": "prepare the chains"})
    chains = [chain for job in jobs for chain in job.chains()]
    rounds = split_rounds(options.iters, options.warmup, ROUNDS)
    tick = Ticker(emit, total=len(chains) * sum(iters + warmup for iters, warmup in rounds))
    timer = StepTimer(barrier, device, tick)
    timed = time_chains(chains, timer, rounds, lambda phase: emit({"phase": phase}))
    checks += timed if options.check else []
    emit({"phase": "close the buffer"})
    barrier.wait()
    buffer.destroy()
    return {"chains": [chain.to_dict() for chain in chains], "checks": [check.to_dict() for check in checks]}


def open_buffer(options: Any, group: Any) -> Any:
    """Opens the Buffer that all modes of the run share, large enough for what the options need."""
    from .. import Buffer

    low_latency = "ll" in options.modes
    num_rdma_bytes = 0
    if low_latency:
        num_rdma_bytes = Buffer.get_low_latency_rdma_size_hint(
            options.ll_tokens, options.hidden, options.ranks, options.experts
        )
    return Buffer(
        group,
        num_nvl_bytes=2 * options.ranks * options.tokens * options.row_bytes if "ht" in options.modes else 0,
        num_rdma_bytes=num_rdma_bytes,
        low_latency_mode=low_latency,
        num_qps_per_rank=max(1, options.experts // options.ranks),
        explicitly_destroy=True,
        device="cpu",
        timeout=min(100.0, options.timeout),
    )


def run_as_process(run: Callable[[int, str, Path, Emit], dict[str, Any]]) -> None:
    """Runs one process: ``argv`` holds its number, the options as JSON and the run's folder."""
    index, options_json, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    emit = event_channel()
    faulthandler.enable()
    die_with_parent()
    try:
        emit({"result": run(index, options_json, folder, emit)})
    except BaseException as error:
        emit({"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
        sys.stderr.flush()
        os._exit(1)  # a peer may be waiting for this rank inside a destructor; the parent ends them all


def main() -> None:
    """Entry of the process."""
    run_as_process(run_rank)


if __name__ == "__main__":
    main()
