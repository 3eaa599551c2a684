"""The calls that published programs for serving make, exactly as they make them: each must run unchanged.

They import ``deep_ep``, as the programs do; the shim gives them deep_moe. On GPUs ``gpu/test_consumers``
runs them.
Results are checked against the reference; beyond that it matters that the calls are taken, and that what
comes back has the form that the program relies on.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
import torch

from deep_moe import reference
from deep_moe.reference import combine as sum_rows

from ..support.attempts import attempt, good_program
from ..support.compare import same_values
from ..support.device import as_here, on_cpu, settle, where
from ..support.inputs import Case
from ..support.program import check, execute
from ..support.ranks import PipeComm, run_job
from ..support.shim import deep_ep

CASE = Case("consumer", (12, 9), hidden=512, experts=8, topk=4)
GIVEN = CASE.inputs()


def inputs_of(buffer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's rows, ids and weights, on the Buffer's device."""
    mine = GIVEN.x[buffer.rank], GIVEN.topk_idx[buffer.rank], GIVEN.topk_weights[buffer.rank]
    x, idx, weights = (where(buffer, one) for one in mine)
    return x, idx, weights


def identity_sum(rank: int) -> torch.Tensor:
    """What combine gives where every rank returns its rows unchanged: the row times the ranks it went to."""
    sent = [reference.layout(idx, 8, 2).is_token_in_rank for idx in GIVEN.topk_idx]
    rows = [x for x in reference.dispatch_cached(GIVEN.x, sent) if isinstance(x, torch.Tensor)]
    return sum_rows(rows, sent)[rank][0]


def job_vllm_high_throughput(comm: Any, rank: int, _: Any) -> Any:
    buffer = deep_ep.Buffer(
        group=None,
        num_nvl_bytes=1 << 24,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=1,
        explicitly_destroy=True,
        comm=comm,
    )
    deep_ep.Buffer.set_num_sms(20)
    x, idx, topk_weights = inputs_of(buffer)
    turns = [threading.Event(), threading.Event()]
    turns[0].set()
    combined: list[Any] = [None, None]

    def micro_batch(which: int) -> None:
        def turn() -> None:
            turns[which].wait()
            turns[which].clear()

        turn()
        previous = deep_ep.Buffer.capture()
        per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
            topk_idx=idx,
            num_experts=8,
            previous_event=previous,
            async_finish=True,
            allocate_on_comm_stream=False,
        )
        sent = buffer.dispatch(
            x=x,
            handle=None,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=idx,
            topk_weights=topk_weights,
            expert_alignment=1,
            config=None,
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=False,
        )
        turns[1 - which].set()
        turn()
        if sent[5].event is not None:
            sent[5].current_stream_wait()
        out, weights, done = buffer.combine(
            x=sent[0],
            handle=sent[4],
            topk_weights=None,
            config=None,
            previous_event=deep_ep.Buffer.capture(),
            async_finish=True,
            allocate_on_comm_stream=False,
        )
        done.current_stream_wait()
        combined[which] = out, weights, done.event is not None
        turns[1 - which].set()

    threads = [threading.Thread(target=as_here(micro_batch), args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    buffer.destroy()
    return combined


def test_vllm_high_throughput(form: str) -> None:
    """Keywords throughout, a chain of events, two micro-batches of one Buffer from two threads in turns."""
    for rank, combined in enumerate(run_job(job_vllm_high_throughput, form=form)):
        for out, weights, has_event in combined:
            same_values(out, identity_sum(rank), f"rank {rank}")
            assert weights is None and has_event


def job_vllm_low_latency(comm: Any, rank: int, _: Any) -> Any:
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=16, hidden=512, num_ranks=2, num_experts=8
    )
    buffer = deep_ep.Buffer(
        group=None,
        num_nvl_bytes=0,
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=4,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=True,
        enable_shrink=True,
        comm=comm,
    )
    assert buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).numel() == size
    x, idx, weights = inputs_of(buffer)
    (rows, scales), count, handle, _, hook = buffer.low_latency_dispatch(
        x,
        idx,
        16,
        8,
        use_fp8=True,
        round_scale=False,
        use_ue8m0=False,
        async_finish=False,
        return_recv_hook=True,
    )
    hook()
    mask = torch.full((2,), 7, dtype=torch.int32, device=buffer.device)
    buffer.low_latency_query_mask_buffer(mask)
    output = torch.empty_like(x)
    y = where(buffer, reference.dequantize(on_cpu(rows), on_cpu(scales).contiguous()).to(x.dtype))
    _, _, hook = buffer.low_latency_combine(
        y,
        idx,
        weights,
        handle,
        async_finish=False,
        zero_copy=False,
        return_recv_hook=True,
        out=output,
    )
    hook()
    buffer.low_latency_clean_mask_buffer()
    buffer.destroy()
    settle(buffer)
    return output, mask.tolist(), int(count.sum()), rows.dtype, scales.stride()


def test_vllm_low_latency(form: str) -> None:
    results = run_job(job_vllm_low_latency, form=form)
    received = reference.low_latency_dispatch(GIVEN.x, GIVEN.topk_idx, 16, 8)
    y = [reference.dequantize(*one.x).bfloat16() for one in received if isinstance(one.x, tuple)]
    expected = reference.low_latency_combine(y, GIVEN.topk_idx, GIVEN.topk_weights, 8, pre_reduced=False)
    for rank, (output, mask, count, dtype, stride) in enumerate(results):
        same_values(output, expected[rank], f"rank {rank}")
        assert mask == [0, 0] and count == int(received[rank].count.sum())
        assert dtype == torch.float8_e4m3fn and stride[1] == 1


TUNED = {
    "num_sms": 24,
    "num_max_nvl_chunked_send_tokens": 8,
    "num_max_nvl_chunked_recv_tokens": 256,
    "num_max_rdma_chunked_send_tokens": 6,
    "num_max_rdma_chunked_recv_tokens": 128,
}


def job_sglang(comm: Any, rank: int, _: Any) -> Any:
    nvl = rdma = 0
    for config in (deep_ep.Buffer.get_dispatch_config(2), deep_ep.Buffer.get_combine_config(2)):
        nvl = max(config.get_nvl_buffer_size_hint(1024, 2), nvl)
        rdma = max(config.get_rdma_buffer_size_hint(1024, 2), rdma)
    rdma = max(deep_ep.Buffer.get_low_latency_rdma_size_hint(16, 512, 2, 8), rdma)
    buffer = deep_ep.Buffer(None, nvl, rdma, low_latency_mode=True, num_qps_per_rank=10, comm=comm)
    assert buffer.group_size == 2 and buffer.low_latency_mode and deep_ep.Buffer.num_sms > 0
    x, idx, weights = inputs_of(buffer)
    results = []
    for _ in range(2):
        layout = buffer.get_dispatch_layout(idx, 8, previous_event=deep_ep.Buffer.capture())
        sent = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=weights,
            num_tokens_per_rank=layout[0],
            num_tokens_per_rdma_rank=layout[1],
            is_token_in_rank=layout[3],
            num_tokens_per_expert=layout[2],
            previous_event=layout[4],
            async_finish=False,
            expert_alignment=128,
            config=deep_ep.Config(**TUNED),
        )
        out = buffer.combine(sent[0], sent[4], config=deep_ep.Config(**TUNED))[0]
        buffer.clean_low_latency_buffer(16, 512, 8)
        low = buffer.low_latency_dispatch(x, idx, 16, 8, use_fp8=False, return_recv_hook=True)
        low[4]()
        low_out = buffer.low_latency_combine(low[0], idx, weights, low[2], return_recv_hook=True)
        low_out[2]()
        results.append((out, sent[3], low_out[0]))
    return results


def test_sglang(form: str) -> None:
    """One Buffer for both modes, sizes from the configs' hints, a Config from a file, and never a destroy."""
    results = run_job(job_sglang, form=form)
    received = reference.low_latency_dispatch(GIVEN.x, GIVEN.topk_idx, 16, 8, use_fp8=False)
    low = reference.low_latency_combine(
        [one.x for one in received if isinstance(one.x, torch.Tensor)],
        GIVEN.topk_idx,
        GIVEN.topk_weights,
        8,
        pre_reduced=False,
    )
    for rank, of_rank in enumerate(results):
        for out, counts, low_out in of_rank:
            same_values(out, identity_sum(rank), f"rank {rank}")
            same_values(low_out, low[rank], f"rank {rank}, low latency")
            assert all(count % 128 == 0 for count in counts)


def job_float_sizes(comm: Any, rank: int, _: Any) -> Any:
    buffer = deep_ep.Buffer(None, 1e7, 2e6, low_latency_mode=True, num_qps_per_rank=8 / 2, comm=comm)
    sizes = buffer.num_nvl_bytes, buffer.num_rdma_bytes
    return sizes, execute(good_program(), rank, [buffer])


def test_rtp_llm_and_lightllm_sizes_are_floats(form: str) -> None:
    results = run_job(job_float_sizes, form=form)
    assert all(sizes == (10**7, 2 * 10**6) for sizes, _ in results)
    check(good_program(), [good for _, good in results])


class Mpi4pyLike(PipeComm):
    def barrier(self) -> None:
        raise AssertionError("only Get_rank, Get_size and allgather may be used")


def job_tensorrt_llm(comm: Any, rank: int, _: Any) -> Any:
    mpi = Mpi4pyLike(rank, 2, comm._links)
    buffer = deep_ep.Buffer(None, 0, 0, num_qps_per_rank=4, low_latency_mode=False, comm=mpi)
    x, idx, weights = inputs_of(buffer)
    layout = buffer.get_dispatch_layout(idx, 8)
    sent = buffer.dispatch(
        x,
        topk_idx=idx,
        topk_weights=weights,
        num_tokens_per_rank=layout[0],
        num_tokens_per_rdma_rank=layout[1],
        is_token_in_rank=layout[3],
        num_tokens_per_expert=layout[2],
    )
    out, _, event = buffer.combine(sent[0], sent[4])
    assert event.event is None and sent[5].event is None
    low = buffer.low_latency_dispatch(x, idx, 12, 8, use_fp8=False)
    assert low[3].event is None and low[4] is None
    back = buffer.low_latency_combine(low[0], idx, weights, low[2])
    assert back[1].event is None and back[2] is None
    return out


def test_tensorrt_llm_communicator(process_form: str) -> None:
    """An mpi4py communicator by keyword, no group; synchronous calls have neither event nor hook."""
    for rank, out in enumerate(run_job(job_tensorrt_llm, form=process_form)):
        same_values(out, identity_sum(rank), f"rank {rank}")


def job_lmdeploy(comm: Any, rank: int, keyword: str) -> Any:
    arguments: dict[str, Any] = {keyword: 1}
    tried = attempt(lambda: deep_ep.Buffer(None, comm=comm, **arguments))
    return tried, deep_ep.Buffer(None, comm=comm).group_size


@pytest.mark.parametrize("keyword", ["num_tokens_hint", "enable_elastic"])
def test_lmdeploy_probes_by_type_error(keyword: str, form: str) -> None:
    """An unknown keyword of the constructor is a TypeError before any exchange; the call without it works."""
    for tried, size in run_job(job_lmdeploy, keyword, form=form):
        tried.must_be(TypeError, keyword)
        assert size == 2


def test_slime_inspects_the_signature() -> None:
    parameters = inspect.signature(deep_ep.Buffer.low_latency_dispatch).parameters
    assert {"use_ue8m0", "round_scale", "use_fp8"} <= set(parameters)
