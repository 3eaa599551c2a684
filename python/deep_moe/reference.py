"""What every operation of deep_moe means, as readable torch code.

One process holds the inputs of all ranks: wherever an argument or a result is a list, its index is the rank.
Nothing here is fast and nothing here is shared with the library; the tests compare the two, bit for bit
wherever the order of the sums is defined.

Words: R ranks, T tokens of a rank, H hidden, E experts, K top-k, L local experts, M the low-latency cap on T,
N received rows. A *payload* is what travels: one tensor ``[T, H]``, or a pair of data ``[T, H]`` and scales
``[T, S]`` or ``[T]``, of any element types. ``-1`` in ``topk_idx`` means "no selection".

Arguments of one name mean the same everywhere: ``x`` payloads; ``topk_idx [T, K]`` int64 or int32, global
expert ids; ``topk_weights [T, K]`` float32; ``in_rank [T, R]`` bool, whether a token goes to a rank;
``num_experts`` E; ``num_ranks`` R; ``num_max_dispatch_tokens_per_rank`` M; ``masked`` the ranks that all
others have masked. Tensors are on the CPU.

How sums are rounded. All sums are fp32, ranks in ascending order, and are rounded once a hop. The combine of
the high-throughput mode has one hop on one node, and two from other nodes (``nodes=``). That of the
low-latency mode has two when each rank pre-reduces the rows of its own experts (``pre_reduced=True``: the
weights were given to the dispatch, or the combine has no hook), and one when every expert's row travels by
itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = [
    "FP8_BLOCK",
    "Layout",
    "LowLatencyReceived",
    "Payload",
    "Received",
    "cast_fp8",
    "combine",
    "dequantize",
    "dispatch",
    "dispatch_cached",
    "expert_owners",
    "experts_of",
    "layout",
    "low_latency_combine",
    "low_latency_dispatch",
    "low_latency_slots",
    "num_tokens_per_node",
    "pack_ue8m0",
    "unpack_ue8m0",
]

Payload: TypeAlias = "Tensor | tuple[Tensor, Tensor]"
"""What travels: a tensor ``[T, H]``, or data ``[T, H]`` and scales ``[T, S]`` or ``[T]``."""

FP8_BLOCK = 128
"""Elements that share one fp8 scale."""
FP8_MAX = 448.0  # largest finite float8_e4m3fn
FP8_MIN_AMAX = 1e-4  # a block's largest magnitude is taken to be at least this


# ---- who owns what ----
def experts_of(rank: int, num_ranks: int, num_experts: int) -> range:
    """The global ids of one rank's experts: a contiguous block; the first E % R ranks own one more."""
    each, extra = divmod(num_experts, num_ranks)
    begin = rank * each + min(rank, extra)
    return range(begin, begin + each + (1 if rank < extra else 0))


def expert_owners(num_experts: int, num_ranks: int) -> Tensor:
    """``[E] int64``: the rank that owns each expert."""
    blocks = [len(experts_of(rank, num_ranks, num_experts)) for rank in range(num_ranks)]
    return torch.repeat_interleave(torch.arange(num_ranks), torch.tensor(blocks))


def _check_ids(topk_idx: Tensor, num_experts: int) -> None:
    wrong = ((topk_idx < -1) | (topk_idx >= num_experts)).nonzero()
    if len(wrong):
        row, k = wrong[0].tolist()
        raise ValueError(
            f"topk_idx[{row}, {k}] is {int(topk_idx[row, k])}; allowed are -1 and 0 to {num_experts - 1}"
        )


# ---- high throughput: layout and dispatch ----
@dataclass(frozen=True)
class Layout:
    """Where one rank's tokens go."""

    num_tokens_per_rank: Tensor  # [R] int32, rows sent to each rank
    num_tokens_per_expert: Tensor  # [E] int32, entries of topk_idx; duplicates within a row count each time
    is_token_in_rank: Tensor  # [T, R] bool, a row goes to a rank once, however many experts it has there


def layout(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Layout:
    """The layout of one rank's ``topk_idx [T, K] int32 or int64``."""
    _check_ids(topk_idx, num_experts)
    token, k = (topk_idx >= 0).nonzero(as_tuple=True)
    expert = topk_idx[token, k].long()
    in_rank = torch.zeros(topk_idx.shape[0], num_ranks, dtype=torch.bool)
    in_rank[token, expert_owners(num_experts, num_ranks)[expert]] = True
    return Layout(
        num_tokens_per_rank=in_rank.sum(0).int(),
        num_tokens_per_expert=torch.bincount(expert, minlength=num_experts).int(),
        is_token_in_rank=in_rank,
    )


@dataclass(frozen=True)
class Received:
    """What one rank holds after a dispatch. Rows are ordered by source rank, then source token."""

    x: Payload  # [N, H], or ([N, H], [N, S]); rows from `num_rows` on are unspecified
    topk_idx: Tensor  # [N, K] of the input's dtype: local expert ids, -1 for experts of other ranks
    topk_weights: Tensor | None  # [N, K] float32, 0 where topk_idx is -1
    num_tokens_per_expert: list[int]  # [L] entries of topk_idx, rounded up; [] with num_worst_tokens
    num_rows: int  # rows that came; N, or less with num_worst_tokens


def dispatch(
    x: Sequence[Payload],
    topk_idx: Sequence[Tensor],
    num_experts: int,
    topk_weights: Sequence[Tensor] | None = None,
    *,
    expert_alignment: int = 1,
    num_worst_tokens: int = 0,
) -> list[Received]:
    """Every row goes once to each rank that owns one of its experts; ``topk_weights [T, K]`` are fp32.

    Counts are rounded up to multiples of ``expert_alignment``. With ``num_worst_tokens`` results have that
    many rows, and there are no counts.

    Raises:
        ValueError: an id outside [-1, E), or more rows than ``num_worst_tokens``.
    """
    num_ranks = len(x)
    in_rank = [layout(idx, num_experts, num_ranks).is_token_in_rank for idx in topk_idx]
    rows = dispatch_cached(x, in_rank)
    received = []
    for rank in range(num_ranks):
        mine = experts_of(rank, num_ranks, num_experts)
        ids = torch.cat([idx[sent[:, rank]] for idx, sent in zip(topk_idx, in_rank, strict=True)])
        here = (ids >= mine.start) & (ids < mine.stop)
        local = torch.where(here, ids - mine.start, -1).to(ids.dtype)
        weights = None
        if topk_weights is not None:
            sent_weights = [w[sent[:, rank]] for w, sent in zip(topk_weights, in_rank, strict=True)]
            weights = torch.where(here, torch.cat(sent_weights), 0.0)
        counts = [int((local == expert).sum()) for expert in range(len(mine))]
        counts = [math.ceil(count / expert_alignment) * expert_alignment for count in counts]
        result = Received(rows[rank], local, weights, counts, len(ids))
        received.append(_pad(result, rank, num_worst_tokens) if num_worst_tokens else result)
    return received


def dispatch_cached(x: Sequence[Payload], in_rank: Sequence[Tensor]) -> list[Payload]:
    """The rows of ``x [T, H]`` alone, along known routes: what ``dispatch(x, handle=handle)`` does."""

    def send(parts: Sequence[Tensor], dst: int) -> Tensor:
        rows = [_as_bytes(part)[sent[:, dst]] for part, sent in zip(parts, in_rank, strict=True)]
        return _as_type(torch.cat(rows), parts[dst])

    return [_each_part(x, partial(send, dst=dst)) for dst in range(len(x))]


def _each_part(x: Sequence[Payload], function: Callable[[Sequence[Tensor]], Tensor]) -> Payload:
    """Apply a function to the ranks' tensors; to the data and the scales apart, where payloads are pairs."""
    if isinstance(x[0], Tensor):
        return function([data for data in x if isinstance(data, Tensor)])
    pairs = [pair for pair in x if not isinstance(pair, Tensor)]
    return function([pair[0] for pair in pairs]), function([pair[1] for pair in pairs])


def _as_bytes(t: Tensor) -> Tensor:
    """``[rows, bytes] uint8``: rows are moved, not interpreted."""
    rows = t.reshape(t.shape[0], math.prod(t.shape[1:]))
    return rows.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _as_type(rows: Tensor, like: Tensor) -> Tensor:
    return rows.view(like.dtype).reshape(*rows.shape[:-1], *like.shape[1:])


def _pad(received: Received, rank: int, num_worst_tokens: int) -> Received:
    missing = num_worst_tokens - received.num_rows
    if missing < 0:
        raise ValueError(
            f"num_worst_tokens is {num_worst_tokens}, but rank {rank} receives {received.num_rows} rows"
        )

    def more(parts: Sequence[Tensor]) -> Tensor:
        rows = _as_bytes(parts[0])
        return _as_type(torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]), parts[0])

    idx, weights = received.topk_idx, received.topk_weights
    if weights is not None:
        weights = torch.cat([weights, weights.new_zeros(missing, weights.shape[1])])
    return Received(
        x=_each_part([received.x], more),
        topk_idx=torch.cat([idx, idx.new_full((missing, idx.shape[1]), -1)]),
        topk_weights=weights,
        num_tokens_per_expert=[],
        num_rows=received.num_rows,
    )


# ---- high throughput: combine ----
def combine(
    y: Sequence[Tensor],
    in_rank: Sequence[Tensor],
    topk_weights: Sequence[Tensor] | None = None,
    bias: Sequence[tuple[Tensor, ...]] | None = None,
    *,
    nodes: Sequence[int] | None = None,
) -> list[tuple[Tensor, Tensor | None]]:
    """The way back: each token gets its biases plus the unweighted sum of its rows ``y [N, H]``.

    ``bias`` are one or two ``[T, H]`` of the type of ``y``.
    ``in_rank`` are the masks ``[T, R]`` of the dispatch; ``topk_weights [N, K]`` are summed in the same way.
    A token that went nowhere gets its biases, or zeros. ``nodes`` is each rank's node, numbered in the order
    of their lowest ranks: nodes are added in ascending order, and the rows that another node holds are first
    summed there and rounded to the type of ``y``, without the weights.
    """
    num_ranks = len(y)
    node_of = [0] * num_ranks if nodes is None else list(nodes)
    returned = []
    for src in range(num_ranks):
        num_tokens = in_rank[src].shape[0]
        total = torch.zeros(num_tokens, y[src].shape[1])
        for one in bias[src] if bias is not None else ():
            total += one.float()
        sum_weights = None if topk_weights is None else torch.zeros(num_tokens, topk_weights[src].shape[1])
        for node in sorted(set(node_of)):
            here = node == node_of[src]
            part = total if here else torch.zeros_like(total)
            part_weights = sum_weights if here or sum_weights is None else torch.zeros_like(sum_weights)
            for dst in [rank for rank in range(num_ranks) if node_of[rank] == node]:
                sent = in_rank[src][:, dst]
                first = sum(int(in_rank[earlier][:, dst].sum()) for earlier in range(src))
                rows = slice(first, first + int(sent.sum()))
                part[sent] += y[dst][rows].float()
                if topk_weights is not None and part_weights is not None:
                    part_weights[sent] += topk_weights[dst][rows]
            if not here:
                total += part.to(y[src].dtype).float()
                if sum_weights is not None and part_weights is not None:
                    sum_weights += part_weights
        returned.append((total.to(y[src].dtype), sum_weights))
    return returned


def num_tokens_per_node(in_rank: Tensor, nodes: Sequence[int]) -> Tensor:
    """``[N] int32``: tokens of ``in_rank [T, R]`` that go to any rank of each of the ``nodes``."""
    node_of = torch.tensor(list(nodes))
    counts = [int(in_rank[:, node_of == node].any(1).sum()) for node in range(int(node_of.max()) + 1)]
    return torch.tensor(counts, dtype=torch.int32)


# ---- fp8 ----
def cast_fp8(x: Tensor, *, round_scale: bool = False, use_ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Cast ``x [..., H]`` to ``float8_e4m3fn`` in blocks of 128 along H: ``x`` is about ``q * scale``.

    The scales are ``[..., H/128] float32``. With ``round_scale`` they are powers of two (rounded up);
    ``use_ue8m0`` implies that and packs the exponents, four to an ``int32``: ``[..., H/512]``.
    """
    blocks = _blocks(x)
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=FP8_MIN_AMAX)
    top = torch.full_like(amax, FP8_MAX)  # a tensor, so that both quotients below are true fp32 divisions
    scale, inverse = amax / top, top / amax
    if round_scale or use_ue8m0:
        scale = _round_up_to_power_of_two(scale)
        inverse = torch.ones_like(scale) / scale
    q = (blocks * inverse).to(torch.float8_e4m3fn).flatten(-2)
    scales = scale.squeeze(-1)
    return (q, pack_ue8m0(scales)) if use_ue8m0 else (q, scales)


def _round_up_to_power_of_two(scale: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent))


def pack_ue8m0(scales: Tensor) -> Tensor:
    """``scales [..., S] float32``, powers of two, as ``[..., S/4] int32`` biased exponents.

    The first of the four in a word is in the lowest byte.
    """
    exponent = scales.contiguous().view(torch.int32) >> 23  # already biased by 127
    return exponent.to(torch.uint8).contiguous().view(torch.int32)


def unpack_ue8m0(packed: Tensor) -> Tensor:
    """The inverse of :func:`pack_ue8m0`: of ``packed [..., S] int32`` the scales ``[..., 4 * S] float32``."""
    exponent = packed.contiguous().view(torch.uint8).int()
    return (exponent << 23).view(torch.float32)


def dequantize(q: Tensor, scales: Tensor) -> Tensor:
    """``[..., H] float32``: what :func:`cast_fp8` has made ``q`` and ``scales``, packed or not, of."""
    values = unpack_ue8m0(scales) if scales.dtype == torch.int32 else scales
    return (_blocks(q) * values.unsqueeze(-1)).flatten(-2)


def _blocks(x: Tensor) -> Tensor:
    return x.float().reshape(*x.shape[:-1], x.shape[-1] // FP8_BLOCK, FP8_BLOCK)


# ---- low latency ----
@dataclass(frozen=True)
class LowLatencyReceived:
    """What one rank holds after a low-latency dispatch."""

    x: Payload  # [L, R*M, H], or a pair with scales [L, R*M, S]
    count: Tensor  # [L] int32, rows of each local expert; those behind them are unspecified


def low_latency_slots(
    topk_idx: Sequence[Tensor], num_experts: int, masked: Collection[int] = ()
) -> tuple[list[Tensor], Tensor]:
    """The row of its expert's block that each entry takes, ``[T, K] int64`` a rank; and the counts ``[E]``.

    An expert's rows are ordered by source rank, then source token; an expert that stands twice in one row of
    topk_idx gets one row. Entries of -1 take none (-1), and so do those of masked ranks.
    """
    for idx in topk_idx:
        _check_ids(idx, num_experts)
    sent = [torch.full_like(idx, -1) if src in masked else idx for src, idx in enumerate(topk_idx)]
    ids = torch.cat(sent).long()
    column = torch.where(ids < 0, num_experts, ids)  # one more column takes the entries that go nowhere
    chosen = torch.zeros(len(ids), num_experts + 1, dtype=torch.long).scatter_(1, column, 1)
    slots = torch.where(ids < 0, -1, (chosen.cumsum(0) - 1).gather(1, column))
    return list(torch.split(slots, [len(idx) for idx in topk_idx])), chosen.sum(0)[:num_experts]


def low_latency_dispatch(
    x: Sequence[Payload],
    topk_idx: Sequence[Tensor],
    num_max_dispatch_tokens_per_rank: int,
    num_experts: int,
    *,
    use_fp8: bool = True,
    round_scale: bool = False,
    use_ue8m0: bool = False,
    masked: Collection[int] = (),
) -> list[LowLatencyReceived]:
    """Every row goes to each of its experts' blocks. Ranks that all others have ``masked`` send nothing.

    ``use_fp8``, ``round_scale`` and ``use_ue8m0``: rows are cast first, as by :func:`cast_fp8`.

    Raises:
        ValueError: a rank has more than ``num_max_dispatch_tokens_per_rank`` tokens, or an id is outside
            [-1, E).
    """
    num_ranks = len(x)
    for rank, idx in enumerate(topk_idx):
        if len(idx) > num_max_dispatch_tokens_per_rank:
            raise ValueError(
                f"rank {rank} has {len(idx)} tokens, more than the cap of {num_max_dispatch_tokens_per_rank}"
            )
    if use_fp8:
        plain = [data for data in x if isinstance(data, Tensor)]
        x = [cast_fp8(data, round_scale=round_scale, use_ue8m0=use_ue8m0) for data in plain]
    slots, counts = low_latency_slots(topk_idx, num_experts, masked)
    ids, slot = torch.cat(list(topk_idx)).long(), torch.cat(slots)

    def expand(tensors: Sequence[Tensor], mine: range) -> Tensor:
        rows = torch.cat([_as_bytes(t) for t in tensors])
        num_slots = num_ranks * num_max_dispatch_tokens_per_rank
        packed = torch.zeros(len(mine), num_slots, rows.shape[1], dtype=torch.uint8)
        token, k = ((slot >= 0) & (ids >= mine.start) & (ids < mine.stop)).nonzero(as_tuple=True)
        packed[ids[token, k] - mine.start, slot[token, k]] = rows[token]
        return _as_type(packed, tensors[0])

    received = []
    for rank in range(num_ranks):
        mine = experts_of(rank, num_ranks, num_experts)
        count = counts[mine.start : mine.stop].int()
        received.append(LowLatencyReceived(_each_part(x, partial(expand, mine=mine)), count))
    return received


def low_latency_combine(
    y: Sequence[Tensor],
    topk_idx: Sequence[Tensor],
    topk_weights: Sequence[Tensor],
    num_experts: int,
    *,
    pre_reduced: bool,
    masked: Collection[int] = (),
) -> list[Tensor]:
    """Each token gets the weighted sum of its rows ``y [L, R*M, H]``: ranks ascending, in a rank by first k.

    An expert that stands twice in a row of topk_idx counts once, with the sum of its weights. With
    ``pre_reduced`` each rank's part of the sum is rounded to the type of ``y`` before the parts are added.
    What masked ranks owe is left out, and the other weights stay as they are.
    """
    num_ranks = len(y)
    slots, _ = low_latency_slots(topk_idx, num_experts, masked)
    owners = expert_owners(num_experts, num_ranks)
    combined = []
    for idx, weights, slot in zip(topk_idx, topk_weights, slots, strict=True):
        total = torch.zeros(len(idx), y[0].shape[2])
        for dst in range(num_ranks):
            if dst in masked:
                continue
            begin = experts_of(dst, num_ranks, num_experts).start
            part = torch.zeros_like(total) if pre_reduced else total
            for k in range(idx.shape[1]):
                token = (slot[:, k] >= 0).nonzero().flatten()
                token = token[owners[idx[token, k].long()] == dst]
                token = token[(idx[token, :k] != idx[token, k : k + 1]).all(1)]  # the first k of this expert
                rows = y[dst][idx[token, k].long() - begin, slot[token, k]].float()
                part[token] += _weight_of(idx[token], weights[token], k).unsqueeze(1) * rows
            if pre_reduced:
                total += part.to(y[0].dtype).float()
        combined.append(total.to(y[0].dtype))
    return combined


def _weight_of(idx: Tensor, weights: Tensor, k: int) -> Tensor:
    """The weight of each row's k-th expert, summed over all the places where that expert stands."""
    total = torch.zeros(len(idx))
    for other in range(k, idx.shape[1]):
        total += torch.where(idx[:, other] == idx[:, k], weights[:, other], 0.0)
    return total
