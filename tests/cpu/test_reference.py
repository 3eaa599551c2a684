"""The reference itself, against dense computations and the definitions written out in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deep_moe import reference

from ..support.compare import same_bits, same_values
from ..support.inputs import PAYLOADS, ROUTINGS, Case, rng


def whole_case(routing: str, tokens: tuple[int, ...] = (6, 0, 9), experts: int = 7) -> Case:
    return Case(routing, tokens, hidden=128, experts=experts, topk=4, dtype=torch.float32, routing=routing)


def whole_inputs(case: Case) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Small whole numbers and weights of eighths: every fp32 sum of them is exact, in any order."""
    given = case.inputs()
    x = [
        torch.randint(-8, 9, (count, case.hidden), generator=rng(3, rank)).float()
        for rank, count in enumerate(case.tokens)
    ]
    return x, given.topk_idx, [(weights * 8).round() / 8 for weights in given.topk_weights]


def dense_layer(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    """A whole layer on one rank: expert e multiplies by e + 1."""
    factor = torch.where(idx >= 0, (idx + 1).float() * weights, 0.0).sum(1)
    return x * factor.unsqueeze(1)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_high_throughput_layer_equals_dense_layer(routing: str) -> None:
    case = whole_case(routing)
    x, idx, weights = whole_inputs(case)
    received = reference.dispatch(x, idx, case.experts, weights)
    y = []
    for rank, got in enumerate(received):
        assert got.topk_weights is not None and isinstance(got.x, Tensor)
        first = reference.experts_of(rank, case.ranks, case.experts).start
        global_ids = torch.where(got.topk_idx >= 0, got.topk_idx + first, -1)
        y.append(dense_layer(got.x, global_ids, got.topk_weights))
    in_rank = [reference.layout(one, case.experts, case.ranks).is_token_in_rank for one in idx]
    combined = reference.combine(
        y, in_rank, [got.topk_weights for got in received if got.topk_weights is not None]
    )
    for rank, (rows, sums) in enumerate(combined):
        same_values(rows, dense_layer(x[rank], idx[rank], weights[rank]), f"rank {rank}")
        same_values(sums, torch.where(idx[rank] >= 0, weights[rank], 0.0), f"weights of rank {rank}")


@pytest.mark.parametrize("pre_reduced", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_low_latency_layer_equals_dense_layer(routing: str, pre_reduced: bool) -> None:
    case = whole_case(routing)
    x, idx, weights = whole_inputs(case)
    received = reference.low_latency_dispatch(x, idx, 9, case.experts, use_fp8=False)
    y = []
    for rank, got in enumerate(received):
        assert isinstance(got.x, Tensor)
        mine = reference.experts_of(rank, case.ranks, case.experts)
        y.append(got.x * torch.tensor([float(expert + 1) for expert in mine]).reshape(-1, 1, 1))
    combined = reference.low_latency_combine(y, idx, weights, case.experts, pre_reduced=pre_reduced)
    for rank, rows in enumerate(combined):
        same_values(rows, dense_layer(x[rank], idx[rank], weights[rank]), f"rank {rank}")


@pytest.mark.parametrize("payload", PAYLOADS)
def test_rows_are_ordered_by_source_rank_then_token(payload: str) -> None:
    case = Case("order", (5, 0, 8), payload=payload, routing="mixed")
    given = case.inputs()
    received = reference.dispatch(given.x, given.topk_idx, case.experts, given.topk_weights)
    for rank in range(case.ranks):
        mine = reference.experts_of(rank, case.ranks, case.experts)
        rows = [
            (source, token)
            for source in range(case.ranks)
            for token, ids in enumerate(given.topk_idx[source].tolist())
            if any(one in mine for one in ids)
        ]
        parts = received[rank].x if isinstance(received[rank].x, tuple) else (received[rank].x,)
        for index, part in enumerate(parts):
            assert isinstance(part, Tensor) and len(part) == len(rows)
            for number, (source, token) in enumerate(rows):
                sent = given.x[source] if len(parts) == 1 else given.x[source][index]
                same_bits(part[number : number + 1], sent[token : token + 1], f"rank {rank}, row {number}")


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("experts", [1, 7, 8, 9, 60])
def test_experts_lie_in_balanced_blocks(ranks: int, experts: int) -> None:
    blocks = [reference.experts_of(rank, ranks, experts) for rank in range(ranks)]
    assert [expert for block in blocks for expert in block] == list(range(experts))
    sizes = [len(block) for block in blocks]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    owners = reference.expert_owners(experts, ranks).tolist()
    assert all(expert in blocks[owner] for expert, owner in enumerate(owners))


def test_counts_are_aligned_and_worst_tokens_pad_the_tail() -> None:
    case = Case("counts", (6, 3), routing="repeated")
    given = case.inputs()
    plain = reference.dispatch(given.x, given.topk_idx, case.experts, given.topk_weights)
    aligned = reference.dispatch(
        given.x, given.topk_idx, case.experts, given.topk_weights, expert_alignment=8
    )
    padded = reference.dispatch(
        given.x, given.topk_idx, case.experts, given.topk_weights, num_worst_tokens=20
    )
    assert sum(sum(one.num_tokens_per_expert) for one in plain) == sum(
        int((i >= 0).sum()) for i in given.topk_idx
    )
    for one, other, third in zip(plain, aligned, padded, strict=True):
        assert other.num_tokens_per_expert == [math.ceil(n / 8) * 8 for n in one.num_tokens_per_expert]
        assert third.num_tokens_per_expert == [] and third.topk_idx.shape[0] == 20
        assert (third.topk_idx[one.num_rows :] == -1).all()
        assert third.topk_weights is not None and (third.topk_weights[one.num_rows :] == 0).all()
    with pytest.raises(ValueError, match="num_worst_tokens is 1, but rank 0 receives 9 rows"):
        reference.dispatch(given.x, given.topk_idx, case.experts, num_worst_tokens=1)


@pytest.mark.parametrize("bad", [16, 23, -2])
def test_ids_out_of_range_are_named(bad: int) -> None:
    idx = torch.zeros(6, 4, dtype=torch.int64)
    idx[5, 2] = bad
    with pytest.raises(ValueError, match=rf"topk_idx\[5, 2\] is {bad}; allowed are -1 and 0 to 15"):
        reference.layout(idx, 16, 2)


def test_two_hops_round_twice() -> None:
    """1 + 2^-9 + 2^-9 in bf16: a rank's part 2^-9 + 1 rounds to 1, the whole sum rounds up."""
    idx, weights = [torch.tensor([[0, 1, 2]]), torch.empty(0, 3).long()], [torch.ones(1, 3), torch.ones(0, 3)]
    y = [torch.zeros(2, 2, 16).bfloat16(), torch.zeros(1, 2, 16).bfloat16()]
    y[0][0, 0], y[0][1, 0], y[1][0, 0] = 1.0, 2.0**-9, 2.0**-8
    one_hop = reference.low_latency_combine(y, idx, weights, 3, pre_reduced=False)
    two_hops = reference.low_latency_combine(y, idx, weights, 3, pre_reduced=True)
    assert one_hop[0].unique().tolist() == [1.0 + 2.0**-7]
    assert two_hops[0].unique().tolist() == [1.0]


def test_biases_come_first_and_may_be_all_there_is() -> None:
    in_rank = [torch.tensor([[True], [False]])]
    bias = [(torch.full((2, 16), 1.0), torch.full((2, 16), 2.0))]
    ((rows, sums),) = reference.combine([torch.full((1, 16), 4.0)], in_rank, None, bias)
    assert rows[:, 0].tolist() == [7.0, 3.0] and sums is None


def test_masked_ranks_neither_send_nor_owe() -> None:
    case = whole_case("uniform", (4, 4, 4), experts=6)
    x, idx, weights = whole_inputs(case)
    received = reference.low_latency_dispatch(x, idx, 4, 6, use_fp8=False, masked={2})
    sent = torch.cat([idx[0], idx[1]])
    for rank in (0, 1):
        mine = reference.experts_of(rank, 3, 6)
        assert received[rank].count.tolist() == [int((sent == expert).sum()) for expert in mine]
    y = [torch.ones(2, 12, case.hidden) for _ in range(3)]
    combined = reference.low_latency_combine(y, idx, weights, 6, pre_reduced=True, masked={2})
    for rank in (0, 1):
        owed = torch.where((idx[rank] >= 0) & (idx[rank] < 4), weights[rank], 0.0).sum(1)
        same_values(combined[rank], owed.unsqueeze(1).expand(-1, case.hidden).contiguous(), f"rank {rank}")


# ---- fp8 ----
def test_fp8_block_by_the_definition() -> None:
    x = torch.randn(3, 256, generator=rng(1)).mul(torch.tensor([[1e-6], [1.0], [3e4]]))
    q, scales = reference.cast_fp8(x)
    for row in range(3):
        for block in range(2):
            values = x[row, block * 128 : (block + 1) * 128]
            amax = max(float(values.abs().max()), float(torch.tensor(1e-4)))
            assert float(scales[row, block]) == float(torch.tensor(amax) / torch.tensor(448.0))
            factor = torch.tensor(448.0) / torch.tensor(amax)
            same_bits(
                q[row : row + 1, block * 128 : (block + 1) * 128],
                (values * factor).to(torch.float8_e4m3fn).unsqueeze(0),
                f"row {row}, block {block}",
            )


@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_rounded_scales_are_the_next_powers_of_two(use_ue8m0: bool) -> None:
    x = torch.randn(64, 512, generator=rng(2)) * torch.logspace(-6, 6, 64).unsqueeze(1)
    x[0, 0], x[0, 1:128] = 448.0, 0.0  # a quotient that is a power of two already
    q, scales = reference.cast_fp8(x, round_scale=True, use_ue8m0=use_ue8m0)
    values = reference.unpack_ue8m0(scales) if use_ue8m0 else scales
    plain = reference.cast_fp8(x)[1]
    exact = [2.0 ** math.ceil(math.log2(scale)) for scale in plain.flatten().double().tolist()]
    assert values.flatten().tolist() == exact and values[0, 0] == 1.0
    assert not q.float().isnan().any()
    if use_ue8m0:
        assert scales.shape == (64, 1) and scales.dtype == torch.int32
        lowest = [int(word) & 0xFF for word in scales.flatten()]
        assert lowest == [int(math.log2(value)) + 127 for value in values[:, 0].tolist()]
        same_bits(reference.pack_ue8m0(values), scales, "packed again")


@pytest.mark.parametrize("round_scale", [False, True])
def test_fp8_error_is_bounded(round_scale: bool) -> None:
    x = torch.randn(32, 1024, generator=rng(4))
    back = reference.dequantize(*reference.cast_fp8(x, round_scale=round_scale))
    amax = x.reshape(32, 8, 128).abs().amax(-1).repeat_interleave(128, 1)
    assert ((back - x).abs() <= x.abs() / 16 + amax * 2.0**-17).all()
