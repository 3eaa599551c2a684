"""Hostile inputs that are a matter of time: streams and events, the end of a Buffer, import without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import deep_moe

from ..support.attempts import attempt, good_program
from ..support.inputs import Case
from ..support.program import check, execute
from ..support.ranks import PipeComm, run_ranks

CASE = Case("life", (12, 9))


@pytest.mark.parametrize("side_stream", [False, True])
def test_a1_ids_written_just_before_are_seen(side_stream: bool, form: str) -> None:
    """New ids are written to the same tensor between calls, with each way to say 'after that'."""
    given, other = CASE.inputs(), CASE.but(seed=5).inputs()

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
        x, idx = given.x[rank], given.topk_idx[rank].clone()
        stream = buffer.get_comm_stream()
        seen = []
        for new in (other.topk_idx[rank], given.topk_idx[rank]):
            with torch.cpu.stream(stream if side_stream else None):  # type: ignore[arg-type]
                idx.copy_(new)
                before = deep_moe.EventOverlap(deep_moe.EventHandle()) if side_stream else buffer.capture()
            layout = buffer.get_dispatch_layout(
                idx, 16, previous_event=before, async_finish=True, allocate_on_comm_stream=True
            )
            received = buffer.dispatch(
                x,
                num_tokens_per_rank=layout[0],
                is_token_in_rank=layout[3],
                num_tokens_per_expert=layout[2],
                topk_idx=idx,
                topk_weights=given.topk_weights[rank],
                previous_event=layout[4],
                async_finish=True,
                allocate_on_comm_stream=True,
            )
            received[5].current_stream_wait()
            seen.append((layout[2], received[1]))
        return seen, execute(good_program(), rank, [buffer])

    results = run_ranks(rank_main, 2, form=form)
    for rank, (seen, _) in enumerate(results):
        for (per_expert, _), used in zip(seen, (other, given), strict=True):
            idx = used.topk_idx[rank]
            assert per_expert.tolist() == torch.bincount(idx[idx >= 0], minlength=16).tolist()
        assert not torch.equal(seen[0][1], seen[1][1])
    check(good_program(), [good for _, good in results])


def every_call(buffer: deep_moe.Buffer, sent: Any, low: Any) -> dict[str, Any]:
    """Each call that needs a live Buffer, with arguments that were good."""
    given, rank = CASE.inputs(), buffer.rank
    x, idx, weights = given.x[rank], given.topk_idx[rank], given.topk_weights[rank]
    return {
        "get_dispatch_layout": lambda: buffer.get_dispatch_layout(idx, 16),
        "dispatch": lambda: buffer.dispatch(x, topk_idx=idx, num_experts=16),
        "cached dispatch": lambda: buffer.dispatch(x, handle=sent[4]),
        "combine": lambda: buffer.combine(sent[0], sent[4]),
        "low_latency_dispatch": lambda: buffer.low_latency_dispatch(x, idx, 12, 16, use_fp8=False),
        "low_latency_combine": lambda: buffer.low_latency_combine(low[0], idx, weights, low[2]),
        "empty": lambda: buffer.empty((2, 2), torch.float32),
        "get_local_buffer_tensor": lambda: buffer.get_local_buffer_tensor(torch.uint8),
        "reset": lambda: buffer.reset(),
        "check": lambda: buffer.check(),
    }


def test_b1_destroy_twice_and_use_after_destroy(form: str) -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        given = CASE.inputs()
        buffer = deep_moe.Buffer(None, comm=comm, timeout=10, explicitly_destroy=True)
        sent = buffer.dispatch(given.x[rank], topk_idx=given.topk_idx[rank], num_experts=16)
        low = buffer.low_latency_dispatch(given.x[rank], given.topk_idx[rank], 12, 16, use_fp8=False)
        comm.allgather(None)  # both are done with each other
        buffer.destroy()
        buffer.destroy()
        return {name: attempt(call) for name, call in every_call(buffer, sent, low).items()}

    for tried in run_ranks(rank_main, 2, form=form):
        for name, one in tried.items():
            assert isinstance(one.error, deep_moe.DestroyedError), f"{name}: {one}"
            assert "destroy" in str(one.error), f"{name}: {one.error}"


def test_b1_destroy_needs_no_peer(form: str) -> None:
    """Destroying is local: one rank does it, and the other still has its rows and can end as well."""
    given = CASE.inputs()

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
        sent = buffer.dispatch(given.x[rank], topk_idx=given.topk_idx[rank], num_experts=16)
        copy = sent[0].clone()
        comm.allgather(None)
        if rank == 1:
            buffer.destroy()
        comm.allgather(None)
        lost = attempt(lambda: buffer.combine(sent[0], sent[4])) if rank == 0 else None
        buffer.destroy()
        return lost, torch.equal(copy, sent[0])

    (lost, kept0), (_, kept1) = run_ranks(rank_main, 2, form=form)
    assert kept0 and kept1
    lost.must_be(deep_moe.PeerLostError, r"rank 1\b")
    assert lost.seconds < 5.0


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
    )


def test_i2_works_without_gpu_driver_or_network_library() -> None:
    """In a process that sees no GPU: import, exchange on the CPU, and a clear word on what is missing."""
    code = """
import torch, deep_moe
(comm,) = deep_moe.thread_comms(1)
buffer = deep_moe.Buffer(None, comm=comm)
x, idx = torch.ones(2, 16), torch.tensor([[0], [1]])
received = buffer.dispatch(x, topk_idx=idx, num_experts=2)
assert torch.equal(buffer.combine(received[0], received[4])[0], x)
try:
    deep_moe.Buffer(None, comm=comm, device="cuda")
except deep_moe.UnavailableError as error:
    print(error)
"""
    done = python(code, CUDA_VISIBLE_DEVICES="", NVSHMEM_HOME="/nowhere")
    assert done.returncode == 0, done.stderr
    assert "install" in done.stdout and "cuda" in done.stdout.lower()


def test_i2_what_the_fork_of_a_test_needs() -> None:
    """Import, then fork, then work: the order that the tests themselves rely on."""
    assert run_ranks(lambda comm, rank: (isinstance(comm, PipeComm), rank), 2) == [(True, 0), (True, 1)]
    good = run_ranks(lambda comm, rank: execute(good_program(), rank, [deep_moe.Buffer(None, comm=comm)]), 2)
    check(good_program(), good)
