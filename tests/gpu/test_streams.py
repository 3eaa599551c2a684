"""Streams, events and CUDA graphs: what waits for what, and whose memory is reused when.

Work that is late is made so by a kernel that sleeps in front of it; what must wait for it would otherwise see
NaN.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe import reference

from ..support.compare import same_bits, same_values
from ..support.device import captured
from ..support.gpu import ONE, WORLDS, World, on_cpu, on_gpu, side_stream
from ..support.inputs import Case, Inputs, random_rows, rng

pytestmark = pytest.mark.gpus(1)

LATE = 20_000_000  # clock cycles, some 10 ms
CASE = Case("streams", (64, 48, 33, 20), hidden=1024, experts=8, topk=3)


@pytest.fixture(params=WORLDS, ids=str)
def world(request: pytest.FixtureRequest) -> World:
    found: World = request.param
    return found


def inputs(ranks: int, seed: int = 0) -> Inputs:
    return CASE.but(tokens=CASE.tokens[:ranks], seed=seed).inputs()


def arguments(given: Inputs, rank: int) -> dict[str, Any]:
    return {
        "topk_idx": on_gpu(given.topk_idx[rank]),
        "topk_weights": on_gpu(given.topk_weights[rank]),
        "num_experts": given.experts,
    }


def rows_of(received: reference.Received) -> torch.Tensor:
    assert isinstance(received.x, torch.Tensor)
    return received.x[: received.num_rows]


def late_copy(source: torch.Tensor) -> tuple[torch.Tensor, deep_moe.EventOverlap]:
    """A copy that another stream makes later, and the event after it."""
    copy = torch.full_like(source, float("nan"))
    side = side_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LATE)
        copy.copy_(source)
        event = deep_moe.Buffer.capture()
    source.record_stream(side)
    copy.record_stream(side)
    return copy, event


def overwrite(like: torch.Tensor) -> list[torch.Tensor]:
    """Takes and fills what memory of this size is free."""
    return [torch.full_like(like, float("nan")) for _ in range(4)]


def check_exchange(given: Inputs, results: list[Any]) -> None:
    """Each rank's (rows, sums of twice the rows) are those of the reference."""
    received = reference.dispatch(given.x, given.topk_idx, given.experts, given.topk_weights)
    route = [reference.layout(idx, given.experts, given.ranks).is_token_in_rank for idx in given.topk_idx]
    sums = reference.combine([rows_of(one) * 2 for one in received], route)
    for rank, (rows, total) in enumerate(results):
        same_bits(rows[: received[rank].num_rows], rows_of(received[rank]), f"rank {rank}, recv_x")
        same_values(total, sums[rank][0], f"rank {rank}, combined_x")


def job_previous_event(comm: Any, rank: int, given: Inputs) -> Any:
    """Calls wait for the event, and the caller for them; inputs are let go at once."""
    buffer = deep_moe.Buffer(None, comm=comm)
    late, event = late_copy(on_gpu(given.x[rank]))
    rows, _, _, _, handle, done = buffer.dispatch(
        late,
        **arguments(given, rank),
        previous_event=event,
        async_finish=True,
        allocate_on_comm_stream=True,
    )
    assert isinstance(done.event, deep_moe.EventHandle) and done.event.cuda_event != 0
    assert done.extra_tensors is not None and any(tensor is late for tensor in done.extra_tensors)
    done.current_stream_wait(release_handle=True)
    assert done.event is None and done.extra_tensors is None

    late, event = late_copy(rows * 2)
    total, _, done = buffer.combine(late, handle, previous_event=event, async_finish=True)
    done.extra_tensors = None
    del late  # now record_stream alone keeps its memory
    taken = overwrite(rows)
    with done:
        torch.cuda._sleep(1000)
    result = rows.clone(), total.clone()
    torch.cuda.current_stream().synchronize()
    del taken
    return result


def test_previous_event_and_async_finish(world: World) -> None:
    given = inputs(world.ranks)
    check_exchange(given, world.run(job_previous_event, given))


def job_current_stream(comm: Any, rank: int, given: Inputs) -> Any:
    """Without events: calls are behind the current stream's work, and its later work is behind them."""
    buffer = deep_moe.Buffer(None, comm=comm)
    x = torch.full_like(on_gpu(given.x[rank]), float("nan"))
    source = on_gpu(given.x[rank])
    torch.cuda._sleep(LATE)
    x.copy_(source)
    rows, _, _, _, handle, event = buffer.dispatch(x, **arguments(given, rank))
    assert event.event is None and event.extra_tensors is None
    x.fill_(float("nan"))
    y = torch.full_like(rows, float("nan"))
    torch.cuda._sleep(LATE)
    y.copy_(rows * 2)
    total, _, event = buffer.combine(y, handle)
    y.fill_(float("nan"))
    assert event.event is None
    return rows, total


def test_calls_follow_and_lead_the_current_stream(world: World) -> None:
    given = inputs(world.ranks)
    check_exchange(given, world.run(job_current_stream, given))


def job_busy_comm_stream(comm: Any, rank: int, given: Inputs) -> Any:
    """A call that the current stream waits for runs there; one that is asynchronous, on the comm stream."""
    buffer = deep_moe.Buffer(None, comm=comm)
    comm_stream, current = buffer.get_comm_stream(), torch.cuda.current_stream()
    x = on_gpu(given.x[rank])
    handle = buffer.dispatch(x, **arguments(given, rank))[4]
    current.synchronize()
    comm.allgather(None)
    with torch.cuda.stream(comm_stream):
        torch.cuda._sleep(40 * LATE)
    rows = buffer.dispatch(x, **arguments(given, rank))[0]
    total = buffer.combine(rows * 2, handle)[0]
    current.synchronize()
    overtaken = not comm_stream.query()
    again, *_, done = buffer.dispatch(x, handle=handle, async_finish=True)
    assert done.event is not None
    waits = not comm_stream.query()
    done.current_stream_wait()
    same = torch.equal(again, rows)
    return rows, total, overtaken, waits, same, comm_stream.query()


def test_calls_run_on_the_current_stream_unless_they_are_asynchronous() -> None:
    for world in (World("thread", 2), World("process", 2)):
        given = inputs(world.ranks)
        results = world.run(job_busy_comm_stream, given)
        check_exchange(given, [result[:2] for result in results])
        assert [result[2:] for result in results] == [(True, True, True, True)] * world.ranks


def job_layout_events(comm: Any, rank: int, given: Inputs) -> Any:
    """V1's three calls, each behind the event of the one before."""
    buffer = deep_moe.Buffer(None, comm=comm)
    late, event = late_copy(on_gpu(given.topk_idx[rank]).double())
    with torch.cuda.stream(side_stream()):
        event.current_stream_wait()
        idx = late.long()
        event = deep_moe.EventOverlap(deep_moe.EventHandle())
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
        idx, given.experts, previous_event=event, async_finish=True, allocate_on_comm_stream=True
    )
    assert per_node is None
    rows, _, _, _, handle, event = buffer.dispatch(
        on_gpu(given.x[rank]),
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=idx,
        topk_weights=on_gpu(given.topk_weights[rank]),
        previous_event=event,
        async_finish=True,
    )
    event.current_stream_wait()
    total, _, event = buffer.combine(rows * 2, handle, async_finish=True)
    event.current_stream_wait()
    return rows, total


def test_v1_calls_behind_each_others_events(world: World) -> None:
    given = inputs(world.ranks)
    check_exchange(given, world.run(job_layout_events, given))


def job_graph(comm: Any, rank: int, rounds: list[Inputs]) -> Any:
    """Captured once, replayed with other rows and ids; ranks capture in turn."""
    first = rounds[0]
    most = sum(map(len, first.topk_idx))
    buffer = deep_moe.Buffer(None, 256 << 20, comm=comm)
    x, call = on_gpu(first.x[rank]), arguments(first, rank)

    def layer() -> Any:
        rows, ids, weights, counts, handle, _ = buffer.dispatch(x, **call, num_worst_tokens=most)
        assert counts == []
        total, summed, _ = buffer.combine(rows * 2, handle, topk_weights=weights)
        return rows, ids, total, summed

    graph, outputs = captured(comm, rank, layer)
    seen = []
    for given in rounds:
        for output in outputs:
            output.fill_(-7)  # what a replay does not write would be seen
        x.copy_(on_gpu(given.x[rank]))
        call["topk_idx"].copy_(on_gpu(given.topk_idx[rank]))
        call["topk_weights"].copy_(on_gpu(given.topk_weights[rank]))
        graph.replay()
        seen.append(on_cpu(list(outputs)))
    eager = buffer.dispatch(x, **call)[0]
    torch.cuda.current_stream().synchronize()
    comm.allgather(None)
    return seen, eager


def test_g1_cuda_graph_replays_with_new_ids(world: World) -> None:
    """New ids, then none at all, then few, into memory that was overwritten."""
    rounds = [inputs(world.ranks, seed) for seed in range(5)]
    for idx in rounds[2].topk_idx:
        idx.fill_(-1)
    for idx in rounds[3].topk_idx:
        idx[3:] = -1
    results = world.run(job_graph, rounds)
    most = sum(map(len, rounds[0].topk_idx))
    for turn, given in enumerate(rounds):
        check_exchange(given, [(seen[turn][0], seen[turn][2]) for seen, _ in results])
        received = reference.dispatch(
            given.x, given.topk_idx, given.experts, given.topk_weights, num_worst_tokens=most
        )
        for rank, (seen, _) in enumerate(results):
            same_bits(seen[turn][1], received[rank].topk_idx, f"replay {turn}, rank {rank}, recv_topk_idx")
            sent = torch.where(given.topk_idx[rank] >= 0, given.topk_weights[rank], 0.0)
            same_values(seen[turn][3], sent, f"replay {turn}, rank {rank}, weights")
    last = rounds[-1]
    received = reference.dispatch(last.x, last.topk_idx, last.experts, last.topk_weights)
    for rank, (_, eager) in enumerate(results):
        same_bits(eager, received[rank].x, f"rank {rank}, after the graph")


def job_comm_stream(comm: Any, rank: int, _: Any) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm)
    stream = buffer.get_comm_stream()
    assert isinstance(stream, torch.cuda.Stream) and stream is buffer.get_comm_stream()
    assert stream.device == buffer.device and stream.cuda_stream == buffer.runtime.comm_stream
    other = deep_moe.Buffer(None, comm=comm)
    default = torch.cuda.default_stream().cuda_stream
    assert len({stream.cuda_stream, other.runtime.comm_stream, default}) == 3
    stream.synchronize()
    return stream.priority, torch.cuda.Stream(priority=-100).priority


def test_comm_stream() -> None:
    ((priority, highest),) = ONE.run(job_comm_stream)
    assert priority <= highest < 0


def job_record_stream(comm: Any, rank: int, _: Any) -> Any:
    """A tensor of the heap that another stream still reads is not given out again."""
    buffer = deep_moe.Buffer(None, 4 << 20, comm=comm)
    wanted = random_rows(rng(3), 256, 1024, torch.float32)
    held = buffer.empty(wanted.shape, torch.float32)
    held.copy_(wanted)
    side = side_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LATE)
        copy = held.clone()
    buffer.record_stream(held, side)
    del held
    taken = [buffer.empty(wanted.shape, torch.float32).fill_(float("nan")) for _ in range(4)]
    side.synchronize()
    del taken
    return copy, wanted


def test_record_stream_keeps_heap_memory() -> None:
    ((copy, wanted),) = ONE.run(job_record_stream)
    same_bits(copy, wanted, "what the other stream has read")


def job_two_threads(comm: Any, rank: int, rounds: list[Inputs]) -> Any:
    """One Buffer, two threads with a stream and a live handle each."""
    buffer = deep_moe.Buffer(None, comm=comm)
    results: dict[int, Any] = {}

    def work(lane: int) -> None:
        given = rounds[lane]
        with torch.cuda.stream(torch.cuda.Stream()):
            x, call = on_gpu(given.x[rank]), arguments(given, rank)
            for _ in range(30):
                rows, _, _, _, handle, event = buffer.dispatch(
                    x, **call, previous_event=deep_moe.Buffer.capture(), async_finish=True
                )
                event.current_stream_wait()
                total = buffer.combine(rows * 2, handle)[0]
            results[lane] = on_cpu((rows, total))

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results[0], results[1]


def test_one_buffer_from_two_threads() -> None:
    rounds = [inputs(1, seed) for seed in (5, 6)]
    (lanes,) = ONE.run(job_two_threads, rounds)
    for given, result in zip(rounds, lanes, strict=True):
        check_exchange(given, [result])


def job_two_buffers(comm: Any, rank: int, rounds: list[Inputs]) -> Any:
    """Two Buffers, each used by a thread of its own on a stream of its own, at the same time."""
    buffers = [deep_moe.Buffer(None, comm=comm) for _ in rounds]
    lanes = [torch.cuda.current_stream(), side_stream()]
    moved = [(on_gpu(given.x[rank]), arguments(given, rank)) for given in rounds]
    torch.cuda.current_stream().synchronize()
    results: dict[int, Any] = {}

    def work(lane: int) -> None:
        x, call = moved[lane]
        with torch.cuda.stream(lanes[lane]):
            for turn in range(20):
                rows, _, _, _, handle, event = buffers[lane].dispatch(x, **call, async_finish=True)
                event.current_stream_wait()
                total = buffers[lane].combine(rows * 2, handle)[0]
                if lane == rank and turn % 5 == 0:
                    torch.cuda._sleep(LATE // 10)  # the ranks' lanes get out of step
            results[lane] = on_cpu((rows, total))

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results.get(lane) for lane in range(2)]


@pytest.mark.parametrize("world", [World("thread", 2), World("process", 2)], ids=str)
def test_b3_two_buffers_two_streams_two_threads(world: World) -> None:
    rounds = [inputs(2, seed) for seed in (7, 8)]
    results = world.run(job_two_buffers, rounds)
    for lane, given in enumerate(rounds):
        check_exchange(given, [lanes[lane] for lanes in results])


def job_late_ids(comm: Any, rank: int, work: tuple[bool, list[Inputs]]) -> Any:
    """Ids written behind a slow kernel, the calls made at once; the same tensors again with other ids."""
    on_the_side, rounds = work
    buffer = deep_moe.Buffer(None, comm=comm)
    x, call = on_gpu(rounds[0].x[rank]), arguments(rounds[0], rank)
    sources = [on_gpu(given.topk_idx[rank]) for given in rounds]
    side, seen = side_stream(), []
    for source in sources:
        stream = side if on_the_side else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(5 * LATE)
            call["topk_idx"].copy_(source)
            event = deep_moe.Buffer.capture()
        behind = {"previous_event": event, "async_finish": True} if on_the_side else {}
        layout = buffer.get_dispatch_layout(call["topk_idx"], call["num_experts"], **behind)
        if on_the_side:
            behind["previous_event"] = layout[4]
        received = buffer.dispatch(x, **call, **behind)
        if on_the_side:
            received[5].current_stream_wait()
        seen.append(on_cpu((layout[0], layout[2], layout[3], received[0], received[1])))
    return seen


@pytest.mark.parametrize("on_the_side", [False, True])
def test_a1_ids_written_just_before_are_seen(on_the_side: bool, world: World) -> None:
    rounds = [inputs(world.ranks, seed) for seed in (11, 12)]
    for other in rounds[1:]:
        other.x[:] = rounds[0].x
    results = world.run(job_late_ids, (on_the_side, rounds))
    for turn, given in enumerate(rounds):
        received = reference.dispatch(given.x, given.topk_idx, given.experts)
        for rank, seen in enumerate(results):
            at, route = (
                f"round {turn}, rank {rank}",
                reference.layout(given.topk_idx[rank], given.experts, world.ranks),
            )
            same_bits(seen[turn][0], route.num_tokens_per_rank, f"{at}, num_tokens_per_rank")
            same_bits(seen[turn][1], route.num_tokens_per_expert, f"{at}, num_tokens_per_expert")
            same_bits(seen[turn][2], route.is_token_in_rank, f"{at}, is_token_in_rank")
            same_bits(seen[turn][3], rows_of(received[rank]), f"{at}, recv_x")
            same_bits(seen[turn][4], received[rank].topk_idx, f"{at}, recv_topk_idx")


def job_let_go(comm: Any, rank: int, given: Inputs) -> Any:
    """Tensors die after their Buffer: received ones, and inputs of asynchronous calls."""
    buffer = deep_moe.Buffer(None, comm=comm)
    x = on_gpu(given.x[rank])
    rows, ids, _, _, handle, event = buffer.dispatch(x, **arguments(given, rank), async_finish=True)
    event.current_stream_wait()
    total, _, event = buffer.combine(rows * 2, handle, async_finish=True)
    event.current_stream_wait()
    torch.cuda.current_stream().synchronize()
    comm.allgather(None)
    buffer.destroy()
    del buffer
    result = rows.cpu(), total.cpu()
    del x, rows, ids, handle, total, event
    taken = overwrite(on_gpu(given.x[rank]))
    torch.cuda.current_stream().synchronize()
    del taken
    return result


def test_tensors_outlive_the_buffer(world: World) -> None:
    given = inputs(world.ranks)
    check_exchange(given, world.run(job_let_go, given))
