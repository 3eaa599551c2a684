"""What a dispatch returns for its combine (and for cached dispatches): plain tuples of tensors.

The contents are private to deep_moe. Hold a handle, pass it back, or spread it into
``ctx.save_for_backward(*handle)`` and pass back the tuple that comes out: any tuple of the same tensors is
taken. They are on the Buffer's device, all but ``meta``, which is on the CPU. A handle holds indices and no
addresses, so it stays valid for as long as its tensors live, also across other calls.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = [
    "DeviceLowLatencyHandle",
    "DispatchHandle",
    "ExpertMajorHandle",
    "InternodeDispatchHandle",
    "InternodeExpertMajorHandle",
    "LowLatencyHandle",
]


class DispatchHandle(NamedTuple):
    """Of the high-throughput mode. R ranks, T tokens of this rank, N received rows."""

    rank_prefix_matrix: Tensor
    """[R, R] int32: at [src, dst] the rows that dst received from ranks up to and including src."""
    recv_src_idx: Tensor
    """[N] int32: each received row's token index at its source; -1 past the rows that arrived."""
    is_token_in_rank: Tensor
    """[T, R] bool: whether the token went to the rank."""
    send_index: Tensor
    """[T, R] int32: the row that the token became there, or -1."""
    meta: Tensor
    """[9] int64: sizes of the call; on GPUs more."""


class InternodeDispatchHandle(NamedTuple):
    """Of the high-throughput mode between D nodes of S ranks. F rows came from peers on other nodes."""

    rank_prefix_matrix: Tensor
    """[R, R] int32, as in :class:`DispatchHandle`, and so are the next three."""
    recv_src_idx: Tensor
    """[N] int32."""
    is_token_in_rank: Tensor
    """[T, R] bool."""
    send_index: Tensor
    """[T, R] int32."""
    send_rdma_index: Tensor
    """[T, D] int32: which of this rank's rows for that node the token is; -1 for none and at its own node."""
    recv_rdma_rank_prefix_sum: Tensor
    """[D] int32: rows that came from this rank's peers on the nodes up to and including this one. On GPUs
    [2, D]: below it the rows sent to the peer on each node."""
    send_nvl_index: Tensor
    """[F, S] int32: the row that each of them became at each rank of this node, or -1. On GPUs with
    num_worst_tokens there are as many rows as there could be, and those past F hold nothing."""
    meta: Tensor
    """[9] int64: sizes of the call; on GPUs more."""


class ExpertMajorHandle(NamedTuple):
    """Of an expert-major dispatch: P rows in L groups, one a local expert. N rows crossed the links."""

    rank_prefix_matrix: Tensor
    """[R, R] int32, as in :class:`DispatchHandle`, and so are the next three."""
    recv_src_idx: Tensor
    """[N] int32."""
    is_token_in_rank: Tensor
    """[T, R] bool."""
    send_index: Tensor
    """[T, R] int32."""
    expert_offsets: Tensor
    """[L + 1] int32: where each expert's group begins, the last being P. ``expert_offsets[1:]`` is what
    ``torch.nn.functional.grouped_mm`` takes as ``offs``."""
    expert_counts: Tensor
    """[L] int32: rows of each group, without the padding behind them."""
    expert_rows: Tensor
    """[N, K] int32: the expert-major row that each entry of a received row became, or -1."""
    meta: Tensor
    """[9] int64: sizes of the call; on GPUs more."""


class InternodeExpertMajorHandle(NamedTuple):
    """The same between nodes."""

    rank_prefix_matrix: Tensor
    """[R, R] int32, as in :class:`InternodeDispatchHandle`, and so are the next six."""
    recv_src_idx: Tensor
    """[N] int32."""
    is_token_in_rank: Tensor
    """[T, R] bool."""
    send_index: Tensor
    """[T, R] int32."""
    send_rdma_index: Tensor
    """[T, D] int32."""
    recv_rdma_rank_prefix_sum: Tensor
    """[D] int32, on GPUs [2, D]."""
    send_nvl_index: Tensor
    """[F, S] int32."""
    expert_offsets: Tensor
    """[L + 1] int32, as in :class:`ExpertMajorHandle`, and so are the next two."""
    expert_counts: Tensor
    """[L] int32."""
    expert_rows: Tensor
    """[N, K] int32."""
    meta: Tensor
    """[9] int64: sizes of the call; on GPUs more."""


AnyDispatchHandle = DispatchHandle | InternodeDispatchHandle | ExpertMajorHandle | InternodeExpertMajorHandle


def handle_type(between_nodes: bool, expert_major: bool) -> type[AnyDispatchHandle]:
    """Of what a dispatch returns."""
    if expert_major:
        return InternodeExpertMajorHandle if between_nodes else ExpertMajorHandle
    return InternodeDispatchHandle if between_nodes else DispatchHandle


class LowLatencyHandle(NamedTuple):
    """Of the low-latency mode on the CPU. R ranks, L local experts, M the cap on tokens a rank, K top-k."""

    src_info: Tensor
    """[L, R * M] int32: each packed row's token index at its source."""
    layout_range: Tensor
    """[L, R] int64: ``begin << 32 | count`` of the rows of each source in an expert's block."""
    recv_pos: Tensor
    """[R, M, K] int32: the packed row of each (source, token, k), or -1."""
    recv_weights: Tensor
    """[R, M, K] float32: the weights given to the dispatch, or empty."""
    meta: Tensor
    """[12] int64: sizes of the call."""


class DeviceLowLatencyHandle(NamedTuple):
    """Of the low-latency mode on a GPU: the same in one tensor, and how many tokens each source has."""

    words: Tensor
    """[bytes] uint8."""
    meta: Tensor
    """[12] int64: sizes of the call; on the CPU."""
