"""Names, argument order, defaults, tuples, attributes and the tuning table of the public API."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import deep_moe

from ..support.attempts import attempt, words
from ..support.inputs import Case
from ..support.ranks import run_ranks

CASE = Case("api", (7, 5))

SIGNATURES = {
    "__init__": "(self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, "
    "num_qps_per_rank=24, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, use_fabric=False, "
    "explicitly_destroy=False, enable_shrink=False, comm=None, *, device=None, timeout=100.0)",
    "destroy": "(self)",
    "is_sm90_compiled": "()",
    "set_num_sms": "(new_num_sms)",
    "capture": "()",
    "get_dispatch_config": "(num_ranks)",
    "get_combine_config": "(num_ranks)",
    "get_low_latency_rdma_size_hint": "(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)",
    "get_comm_stream": "(self)",
    "get_local_buffer_tensor": "(self, dtype, size=None, offset=0, use_rdma_buffer=False)",
    "get_dispatch_layout": "(self, topk_idx, num_experts, previous_event=None, async_finish=False, "
    "allocate_on_comm_stream=False)",
    "dispatch": "(self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, "
    "is_token_in_rank=None, num_tokens_per_expert=None, topk_idx=None, topk_weights=None, "
    "expert_alignment=1, num_worst_tokens=0, config=None, previous_event=None, async_finish=False, "
    "allocate_on_comm_stream=False, *, num_experts=None, expert_major=False)",
    "combine": "(self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None, "
    "async_finish=False, allocate_on_comm_stream=False, *, out=None, row_weights=None)",
    "clean_low_latency_buffer": "(self, num_max_dispatch_tokens_per_rank, hidden, num_experts)",
    "low_latency_dispatch": "(self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, "
    "cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, use_fp8=True, "
    "round_scale=False, use_ue8m0=False, async_finish=False, return_recv_hook=False, *, topk_weights=None)",
    "low_latency_combine": "(self, x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, "
    "async_finish=False, return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None)",
    "get_next_low_latency_combine_buffer": "(self, handle)",
    "low_latency_update_mask_buffer": "(self, rank_to_mask, mask=False)",
    "low_latency_query_mask_buffer": "(self, mask_status)",
    "low_latency_clean_mask_buffer": "(self)",
    "empty": "(self, shape, dtype)",
    "record_stream": "(self, tensor, stream)",
    "memory_stats": "(self)",
    "check": "(self)",
    "reset": "(self)",
}


def bare(function: Any) -> str:
    """The signature without annotations."""
    signature = inspect.signature(function)
    parameters = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    assert bare(getattr(deep_moe.Buffer, name)) == SIGNATURES[name]


def test_internode_calls_are_the_same_calls() -> None:
    for name in ("dispatch", "combine"):
        assert bare(getattr(deep_moe.Buffer, f"internode_{name}")) == SIGNATURES[name]


def test_event_signatures() -> None:
    assert bare(deep_moe.EventOverlap.__init__) == "(self, event=None, extra_tensors=None)"
    assert bare(deep_moe.EventOverlap.current_stream_wait) == "(self, release_handle=False)"
    assert len(inspect.signature(deep_moe.EventOverlap.register_hook_after_wait).parameters) == 2


def test_exported_names() -> None:
    for name in deep_moe.__all__:
        assert hasattr(deep_moe, name), name
    assert deep_moe.topk_idx_t is torch.int64
    assert deep_moe.__version__.count(".") >= 2
    errors = [getattr(deep_moe, name) for name in deep_moe.__all__ if name.endswith("Error")]
    assert len(errors) == 9
    for error in errors:
        assert issubclass(error, deep_moe.Error) and issubclass(error, RuntimeError)
        assert error.__module__ == "deep_moe"
    assert issubclass(deep_moe.BufferTooSmallError, ValueError)


# ---- Config ----
FIELDS = (
    "num_sms",
    "num_max_nvl_chunked_send_tokens",
    "num_max_nvl_chunked_recv_tokens",
    "num_max_rdma_chunked_send_tokens",
    "num_max_rdma_chunked_recv_tokens",
)
DISPATCH = {
    2: (24, 256, 6, 128),
    4: (6, 256, 6, 128),
    8: (6, 256, 6, 128),
    16: (36, 288, 20, 128),
    **dict.fromkeys((24, 32, 48, 64), (32, 288, 8, 128)),
    96: (20, 480, 12, 128),
    128: (20, 560, 12, 128),
    144: (32, 720, 12, 128),
    160: (28, 720, 12, 128),
}
COMBINE = {
    2: (10, 256, 6, 128),
    4: (9, 256, 6, 128),
    8: (4, 256, 6, 128),
    16: (4, 288, 12, 128),
    **dict.fromkeys((24, 32, 48, 64), (1, 288, 8, 128)),
    96: (1, 480, 8, 128),
    128: (1, 560, 8, 128),
    144: (2, 720, 8, 128),
    160: (2, 720, 8, 128),
}


def values(config: deep_moe.Config) -> tuple[int, ...]:
    return tuple(getattr(config, field) for field in FIELDS)


@pytest.mark.parametrize("ranks", DISPATCH)
def test_tuned_config(ranks: int) -> None:
    sms = deep_moe.Buffer.num_sms
    dispatch = deep_moe.Buffer.get_dispatch_config(ranks)
    combine = deep_moe.Buffer.get_combine_config(ranks)
    # What is sent over the network in one go divides what is received, so the library may have rounded it up.
    assert values(dispatch)[:4] == (sms, *DISPATCH[ranks][:3])
    assert values(combine)[:4] == (sms, *COMBINE[ranks][:3])
    for config, table in ((dispatch, DISPATCH), (combine, COMBINE)):
        send, recv = table[ranks][2:]
        assert values(config)[4] in (recv, -(-recv // send) * send)


@pytest.mark.parametrize("ranks", [1, 3, 5, 6, 7, 9, 12, 20, 40, 100, 161, 512])
def test_other_rank_counts_have_a_config(ranks: int) -> None:
    for config in (deep_moe.Buffer.get_dispatch_config(ranks), deep_moe.Buffer.get_combine_config(ranks)):
        sms, send, recv, rdma_send, rdma_recv = values(config)
        assert sms == deep_moe.Buffer.num_sms and 0 < send < recv and 0 < rdma_send <= rdma_recv // 2


@pytest.mark.parametrize("ranks", [0, -1])
def test_rank_counts_below_one_have_none(ranks: int) -> None:
    attempt(lambda: deep_moe.Buffer.get_dispatch_config(ranks)).must_be(
        ValueError, *words("num_ranks", ranks)
    )


def test_config_defaults_positions_and_keywords() -> None:
    assert values(deep_moe.Config())[:4] == (20, 6, 256, 6)
    assert values(deep_moe.Config(24, 8, 512, 16, 128)) == (24, 8, 512, 16, 128)
    keywords = dict(zip(FIELDS, (24, 8, 512, 16, 128), strict=True))
    assert values(deep_moe.Config(**keywords)) == (24, 8, 512, 16, 128)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_sms": 0}, "num_sms"),
        ({"num_max_nvl_chunked_send_tokens": 0}, "num_max_nvl_chunked_send_tokens"),
        (
            {"num_max_nvl_chunked_send_tokens": 256},
            "num_max_nvl_chunked_(send|recv)_tokens",
        ),
        ({"num_max_rdma_chunked_send_tokens": 256}, "num_max_rdma_chunked_(send|recv)_tokens"),
        ({"num_max_rdma_chunked_recv_tokens": -1}, "num_max_rdma_chunked_(send|recv)_tokens"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()),
)
def test_config_refuses(arguments: dict[str, int], says: str) -> None:
    attempt(lambda: deep_moe.Config(**arguments)).must_be(ValueError, says)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16, 160])
def test_size_hints_grow_with_the_rows(ranks: int) -> None:
    config = deep_moe.Buffer.get_dispatch_config(ranks)
    for hint in (config.get_nvl_buffer_size_hint, config.get_rdma_buffer_size_hint):
        sizes = [hint(hidden_bytes, ranks) for hidden_bytes in (1024, 14336, 28672)]
        assert all(type(size) is int and size >= 0 for size in sizes) and sizes == sorted(sizes)
    assert config.get_nvl_buffer_size_hint(14336, ranks) > 0
    hint = deep_moe.Buffer.get_low_latency_rdma_size_hint
    assert 0 < hint(64, 7168, ranks, 256) < hint(128, 7168, ranks, 256)
    assert hint(num_max_dispatch_tokens_per_rank=64, hidden=7168, num_ranks=ranks, num_experts=256) > 0


# ---- Buffer ----
def test_num_sms_is_of_the_class() -> None:
    before = deep_moe.Buffer.num_sms
    try:
        deep_moe.Buffer.set_num_sms(24)
        assert deep_moe.Buffer.num_sms == 24
        assert deep_moe.Buffer.get_dispatch_config(8).num_sms == 24
        attempt(lambda: deep_moe.Buffer.set_num_sms(0)).must_be(ValueError, "num_sms")
    finally:
        deep_moe.Buffer.set_num_sms(before)


def test_is_sm90_compiled_is_a_bool() -> None:
    assert type(deep_moe.Buffer.is_sm90_compiled()) is bool


def test_attributes_report_what_was_given(form: str) -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, 1 << 20, 1 << 16, True, 8, comm=comm, explicitly_destroy=True)
        names = ("rank", "group_size", "num_nvl_bytes", "num_rdma_bytes", "low_latency_mode", "num_sms")
        seen = [getattr(buffer, name) for name in names]
        has = buffer.group is comm, buffer.runtime is not None, buffer.device
        stream = buffer.get_comm_stream()
        stream.synchronize()
        buffer.destroy()
        return seen, has

    for rank, (seen, has) in enumerate(run_ranks(rank_main, 2, form=form)):
        assert seen == [rank, 2, 1 << 20, 1 << 16, True, 20] and has == (True, True, torch.device("cpu"))


WRONG = {
    "bytes-with-fraction": ({"num_nvl_bytes": 1.5}, ValueError, ("num_nvl_bytes", 1.5)),
    "bytes-negative": ({"num_rdma_bytes": -1}, ValueError, ("num_rdma_bytes", -1)),
    "bytes-text": ({"num_nvl_bytes": "1"}, TypeError, ("num_nvl_bytes", "str")),
    "qps-with-fraction": ({"num_qps_per_rank": 1.25}, ValueError, ("num_qps_per_rank",)),
    "timeout-zero": ({"timeout": 0}, ValueError, ("timeout",)),
    "timeout-text": ({"timeout": "soon"}, TypeError, ("timeout", "str")),
    "device-unknown": ({"device": "abacus"}, ValueError, ("device", "abacus")),
}


@pytest.mark.parametrize("name", WRONG)
def test_constructor_refuses_on_one_rank(name: str, form: str) -> None:
    """The rank that is wrong says what is; the other does not wait for it; both can then make a Buffer."""
    arguments, error, says = WRONG[name]

    def rank_main(comm: Any, rank: int) -> Any:
        tried = attempt(lambda: deep_moe.Buffer(None, comm=comm, **(arguments if rank == 1 else {})))
        tried.value = None
        return tried, deep_moe.Buffer(None, comm=comm).group_size

    (first, size0), (second, size1) = run_ranks(rank_main, 2, form=form)
    second.must_be(error, *words(*says))
    first.must_be(deep_moe.PeerRefusedError, r"rank 1\b", *words(*says))
    assert (size0, size1) == (2, 2)


def test_constructor_needs_a_group() -> None:
    attempt(lambda: deep_moe.Buffer(None)).must_be(ValueError, "group", "comm")
    attempt(lambda: deep_moe.Buffer("world")).must_be(TypeError, "group", "str")
    attempt(lambda: deep_moe.Buffer(None, comm=object())).must_be(TypeError, "comm", "Get_rank")
    attempt(lambda: deep_moe.thread_comms(0)).must_be(ValueError, *words("num_ranks", 0))


def test_results_are_flat_tuples_of_tensors(form: str) -> None:
    """Lengths of tuples; handles that spread into tensors; events and hooks of synchronous calls."""
    given = CASE.inputs()

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm)
        x, idx, weights = given.x[rank], given.topk_idx[rank], given.topk_weights[rank]
        layout = buffer.get_dispatch_layout(idx, 16)
        sent = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=16)
        only_ids = buffer.dispatch(x, topk_idx=idx, num_experts=16)
        back = buffer.combine(sent[0], sent[4])
        low = buffer.low_latency_dispatch(x, idx, 8, 16)
        low_back = buffer.low_latency_combine(low[0][0].to(x.dtype), idx, weights, low[2])
        tensors = [isinstance(one, torch.Tensor) for one in (*sent[4], *low[2])]
        kinds = type(sent[4]).__name__, type(low[2]).__name__
        lengths = [len(one) for one in (layout, sent, back, low, low_back)]
        events = [layout[4], sent[5], back[2], low[3], low_back[1]]
        no_weights = only_ids[1] is not None and only_ids[2] is None and back[1] is None
        hooks = low[4] is None and low_back[2] is None
        return lengths, all(tensors), kinds, [event.event for event in events], hooks, no_weights

    for lengths, tensors, kinds, events, hooks, no_weights in run_ranks(rank_main, 2, form=form):
        assert lengths == [5, 6, 3, 5, 3] and tensors and hooks and no_weights
        assert kinds == ("DispatchHandle", "LowLatencyHandle")
        assert events == [None] * 5
