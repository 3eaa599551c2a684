"""Low-latency calls in CUDA graphs: new ids, fewer tokens and none at each replay, beside ordinary calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_moe
from deep_moe import reference

from ..support.attempts import attempt, good_program
from ..support.compare import same_bits, same_values
from ..support.device import captured
from ..support.gpu import ONE, World, on_cpu, on_gpu
from ..support.inputs import Case, Inputs
from ..support.low_latency import near_sums
from ..support.program import check, execute, packed

pytestmark = pytest.mark.gpus(1)

TWO = World("thread", 2)
WORLDS = [ONE, TWO, World("thread", 4), World("process", 2)]
CASE = Case("graphs", (24, 17, 9, 20), hidden=512, experts=9, topk=3)
CAP = 24
MODES = ["plain", "weights", "hook", "hook weights", "logfmt", "logfmt weights", "hook logfmt"]


def rounds_of(ranks: int) -> list[Inputs]:
    """New ids; none; those of the first three tokens; new ones again."""
    rounds = [CASE.but(tokens=CASE.tokens[:ranks], seed=seed).inputs() for seed in range(5)]
    for idx in rounds[1].topk_idx:
        idx.fill_(-1)
    for idx in rounds[2].topk_idx:
        idx[3:] = -1
    return rounds


class Layer:
    """A dispatch and a combine of what came, on tensors that stay where they are."""

    def __init__(self, buffer: deep_moe.Buffer, given: Inputs, mode: str) -> None:
        self.buffer, self.mode, self.experts = buffer, mode, given.experts
        mine = given.x[buffer.rank], given.topk_idx[buffer.rank], given.topk_weights[buffer.rank]
        self.x, self.idx, self.weights = (on_gpu(one) for one in mine)

    def use(self, given: Inputs) -> None:
        rank = self.buffer.rank
        for tensor, source in (
            (self.x, given.x[rank]),
            (self.idx, given.topk_idx[rank]),
            (self.weights, given.topk_weights[rank]),
        ):
            tensor.copy_(on_gpu(source))

    def run(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(packed rows, their counts, sums)"""
        hook = "hook" in self.mode
        options: dict[str, Any] = {"topk_weights": self.weights} if self.mode.endswith("weights") else {}
        rows, count, handle, _, receive = self.buffer.low_latency_dispatch(
            self.x, self.idx, CAP, self.experts, use_fp8=False, return_recv_hook=hook, **options
        )
        if receive is not None:
            receive()
        assert isinstance(rows, torch.Tensor)
        total, _, receive = self.buffer.low_latency_combine(
            rows, self.idx, self.weights, handle, return_recv_hook=hook, use_logfmt="logfmt" in self.mode
        )
        if receive is not None:
            receive()
        return rows, count, total


def check_round(given: Inputs, mode: str, results: list[Any], at: str) -> None:
    received = reference.low_latency_dispatch(given.x, given.topk_idx, CAP, given.experts, use_fp8=False)
    y = [one.x for one in received if isinstance(one.x, torch.Tensor)]
    pre_reduced = "weights" in mode or "hook" not in mode
    sums = reference.low_latency_combine(
        y, given.topk_idx, given.topk_weights, given.experts, pre_reduced=pre_reduced
    )
    for rank, (rows, count, total) in enumerate(results):
        same_bits(count, received[rank].count, f"{at}, rank {rank}, counts")
        same_bits(packed(rows, count), packed(y[rank], count), f"{at}, rank {rank}, rows")
        if "logfmt" not in mode:
            same_values(total, sums[rank], f"{at}, rank {rank}, sums")
    if "logfmt" in mode:
        near_sums([total for *_, total in results], sums, y, given, f"{at}, sums")


def job_graph(comm: Any, rank: int, work: tuple[str, list[Inputs]]) -> Any:
    mode, rounds = work
    buffer = deep_moe.Buffer(None, 64 << 20, comm=comm, timeout=20)
    layer = Layer(buffer, rounds[0], mode)
    graph, outputs = captured(comm, rank, layer.run)
    seen = []
    for given in rounds:
        layer.use(given)
        outputs[0].fill_(-7)
        outputs[2].fill_(-7)  # what a replay does not write would be seen
        graph.replay()
        seen.append(on_cpu(list(outputs)))
    seen.append(on_cpu(list(layer.run())))
    buffer.check()
    comm.allgather(None)
    return seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_g1_replays_with_new_ids(world: World, mode: str) -> None:
    rounds = rounds_of(world.ranks)
    results = world.run(job_graph, (mode, rounds))
    for turn, given in enumerate([*rounds, rounds[-1]]):
        check_round(given, mode, [seen[turn] for seen in results], f"replay {turn}")


def job_beside(comm: Any, rank: int, rounds: list[Inputs]) -> Any:
    """Rank 0 replays what the others call, then the other way round; high-throughput calls in between."""
    buffer = deep_moe.Buffer(None, 64 << 20, comm=comm, timeout=20)
    layer = Layer(buffer, rounds[0], "weights")
    graph, outputs = captured(comm, rank, layer.run)
    seen = []
    for turn, given in enumerate([*rounds, *rounds]):
        layer.use(given)
        if (rank == 0) == (turn < len(rounds)):
            graph.replay()
            seen.append(on_cpu(list(outputs)))
        else:
            seen.append(on_cpu(list(layer.run())))
        if turn % 2 == 0:
            buffer.dispatch(layer.x, topk_idx=layer.idx, num_experts=given.experts)
    buffer.check()
    comm.allgather(None)
    return seen


@pytest.mark.parametrize("world", [TWO, World("thread", 4)], ids=str)
def test_one_rank_replays_while_others_call(world: World) -> None:
    rounds = rounds_of(world.ranks)
    results = world.run(job_beside, rounds)
    for turn, given in enumerate([*rounds, *rounds]):
        check_round(given, "weights", [seen[turn] for seen in results], f"turn {turn}")


def job_small_staging(comm: Any, rank: int, given: Inputs) -> Any:
    """Nothing can grow inside a capture: an error that says so, and then all is as before."""
    buffer = deep_moe.Buffer(None, 64 << 20, comm=comm, timeout=20)
    layer = Layer(buffer, given, "plain")
    graph, tried = torch.cuda.CUDAGraph(), None
    for turn in range(comm.Get_size()):
        comm.allgather(None)
        if turn == rank:
            stream = torch.cuda.current_stream()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                tried = attempt(layer.run)
    comm.allgather(None)
    good = execute(good_program(), rank, [buffer])
    graph, outputs = captured(comm, rank, layer.run)
    graph.replay()
    return tried, good, on_cpu(list(outputs))


def test_staging_does_not_grow_inside_a_capture() -> None:
    given = CASE.but(tokens=CASE.tokens[:2]).inputs()
    results = TWO.run(job_small_staging, given)
    for tried, *_ in results:
        tried.must_be(deep_moe.BufferTooSmallError, "staging", "captured", "num_rdma_bytes")
    check(good_program(), [good for _, good, _ in results])
    check_round(given, "plain", [outputs for *_, outputs in results], "replay")


def job_grown_behind(comm: Any, rank: int, given: Inputs) -> Any:
    """The staging grows after a capture: the graph's own stays, and nothing else lies in it."""
    buffer = deep_moe.Buffer(None, 256 << 20, comm=comm, timeout=20)
    layer = Layer(buffer, given, "plain")
    graph, outputs = captured(comm, rank, layer.run)
    wide = Case("wide", (24, 17), hidden=4096).inputs()
    x, idx = on_gpu(wide.x[rank]), on_gpu(wide.topk_idx[rank])
    buffer.low_latency_dispatch(x, idx, 200, wide.experts, use_fp8=False)
    torch.cuda.current_stream().synchronize()
    live = [buffer.empty((4 << 20,), torch.uint8).fill_(number + 1) for number in range(24)]
    graph.replay()
    result = on_cpu(list(outputs))
    comm.allgather(None)
    intact = all(bool((one == number + 1).all()) for number, one in enumerate(live))
    buffer.check()
    return intact, result


def test_staging_that_grows_behind_a_capture() -> None:
    given = CASE.but(tokens=CASE.tokens[:2]).inputs()
    results = TWO.run(job_grown_behind, given)
    assert all(intact for intact, _ in results)
    check_round(given, "plain", [outputs for _, outputs in results], "replay")
