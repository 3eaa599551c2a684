"""The bench's layer: experts, the dense check, fp8 casts, and the same exchange through gloo."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from deep_moe.cli.chains import Check
from deep_moe.cli.collectives import collective_combine, collective_dispatch
from deep_moe.cli.experts import (
    ExpertBank,
    cast_fp8,
    local_experts,
    owners,
    ranks_of_tokens,
    relative_error,
    uncast_fp8,
)
from deep_moe.cli.gate import made_up_routes
from deep_moe.cli.inputs import Inputs, make_inputs
from deep_moe.cli.jobs import expected_echo
from deep_moe.cli.launch import run_ranks
from deep_moe.cli.options import BenchOptions

CPU = torch.device("cpu")
NUM_RANKS, NUM_EXPERTS, HIDDEN = 3, 10, 32


@pytest.mark.parametrize(("ranks", "experts"), [(8, 60), (2, 9), (4, 64), (4, 3), (1, 5)])
def test_experts_form_balanced_blocks(ranks: int, experts: int) -> None:
    blocks = [local_experts(rank, ranks, experts) for rank in range(ranks)]
    assert [expert for block in blocks for expert in block] == list(range(experts))
    assert len(blocks[0]) - len(blocks[-1]) <= 1
    assert owners(ranks, experts).tolist() == [rank for rank, block in enumerate(blocks) for _ in block]


def test_ranks_of_tokens_leaves_out_none() -> None:
    topk_idx = torch.tensor([[0, 3], [-1, 9], [-1, -1], [4, 5]])
    assert ranks_of_tokens(topk_idx, NUM_RANKS, NUM_EXPERTS).int().tolist() == [
        [1, 0, 0],
        [0, 0, 1],
        [0, 0, 0],
        [0, 1, 0],
    ]
    assert (owners(NUM_RANKS, NUM_EXPERTS) == torch.tensor([0] * 4 + [1] * 3 + [2] * 3)).all()


def spread(x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The layer as ranks compute it, in one process: each rank's experts on the rows it is sent, summed."""
    out = torch.zeros(x.shape[0], HIDDEN)
    is_in = ranks_of_tokens(topk_idx, NUM_RANKS, NUM_EXPERTS)
    for rank in range(NUM_RANKS):
        mine = local_experts(rank, NUM_RANKS, NUM_EXPERTS)
        rows = is_in[:, rank].nonzero()[:, 0]
        ids = topk_idx[rows]
        is_local = (ids >= mine.start) & (ids < mine.stop)
        local_idx = torch.where(is_local, ids - mine.start, -1)
        bank = ExpertBank(mine, HIDDEN, 8, seed=4, device=CPU)
        out[rows] += bank.weighted_rows(x[rows], local_idx, torch.where(is_local, weights[rows], 0.0))
    return out


def layer_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(9))
    topk_idx, weights = made_up_routes("zipf", 40, NUM_EXPERTS, 3, seed=2)
    topk_idx[5] = torch.tensor([7, 7, 2])
    topk_idx[6, 1] = -1
    return x, topk_idx, weights


def test_experts_over_ranks_equal_the_dense_layer() -> None:
    x, topk_idx, weights = layer_inputs()
    bank = ExpertBank(range(0), HIDDEN, 8, seed=4, device=CPU)
    dense = bank.dense(x, topk_idx, weights, NUM_EXPERTS)
    assert relative_error(spread(x, topk_idx, weights), dense) < 1e-5
    weights[0, 0] *= 1.5
    assert relative_error(spread(x, topk_idx, weights), dense) > 1e-2


def test_packed_rows_apply_each_local_expert_to_its_rows() -> None:
    bank = ExpertBank(range(4, 6), HIDDEN, 8, seed=4, device=CPU)
    x = torch.randn(2, 5, HIDDEN)
    out = bank.packed_rows(x, [3, 0], torch.zeros(2, 5, HIDDEN))
    ones, ids = torch.ones(3, 1), torch.full((3, 1), 4)
    torch.testing.assert_close(out[0, :3], bank.dense(x[0, :3], ids, ones, 6))
    assert not out[0, 3:].any()
    assert not out[1].any()


def test_relative_error_sees_every_kind_of_wrong_result() -> None:
    good = torch.tensor([[100.0, 1.0], [0.0, 0.0]])
    assert relative_error(good, good) == 0.0
    assert relative_error(torch.tensor([[101.0, 1.0], [0.0, 0.0]]), good) == pytest.approx(0.01)
    assert relative_error(torch.tensor([[100.0, 1.0], [0.0, 0.5]]), good) == 0.5
    assert relative_error(torch.tensor([[math.nan, 1.0], [0.0, 0.0]]), good) == math.inf
    assert relative_error(good[:1], good) == math.inf
    assert relative_error(torch.zeros(0, 2), torch.zeros(0, 2)) == 0.0
    assert Check("x", 0.1, 0.1).to_dict()["passed"]
    assert not Check("x", math.nan, 0.1).to_dict()["passed"]


def test_fp8_cast_is_close_and_takes_no_rows() -> None:
    x = torch.randn(7, 256) * torch.logspace(-3, 3, 7).unsqueeze(1)
    data, scales = cast_fp8(x)
    assert data.dtype == torch.float8_e4m3fn
    assert scales.shape == (7, 2)
    assert relative_error(uncast_fp8(data, scales), x) < 2**-4
    assert uncast_fp8(*cast_fp8(torch.zeros(0, 256))).shape == (0, 256)
    assert not uncast_fp8(*cast_fp8(torch.zeros(2, 128))).any()


def test_fp8_cast_divides_with_one_rounding() -> None:
    """448/3 times 1.125 is 168 in float32, the middle of 160 and 176: it goes to the even one."""
    x = torch.zeros(1, 128)
    x[0, 0], x[0, 1] = 3.0, 1.125
    data, scales = cast_fp8(x)
    assert data[0, :2].float().tolist() == [448.0, 160.0]
    assert scales.item() == torch.tensor(3.0).div(torch.tensor(448.0)).item()


def test_echo_multiplies_by_the_number_of_ranks() -> None:
    x, topk_idx, weights = layer_inputs()
    options = BenchOptions(ranks=NUM_RANKS, experts=NUM_EXPERTS)
    echo = expected_echo(Inputs(x, topk_idx, weights, None), options)
    copies = [
        len({int(owners(NUM_RANKS, NUM_EXPERTS)[e]) for e in row if e >= 0}) for row in topk_idx.tolist()
    ]
    torch.testing.assert_close(echo, x * torch.tensor(copies).unsqueeze(1))


def gloo_rank(rank: int, options_json: str, folder: Path) -> dict[str, float]:
    """Runs the layer through gloo and returns its errors; what the test's own rank processes do."""
    import torch.distributed as dist

    options = BenchOptions.from_json(options_json)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=options.ranks
    )
    inputs = make_inputs(options, rank, CPU)
    mine = local_experts(rank, options.ranks, options.experts)
    bank = ExpertBank(mine, options.hidden, options.ffn, options.seed, CPU)
    rows, handle = collective_dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, options.experts)
    y = bank.weighted_rows(rows.x, rows.topk_idx, rows.topk_weights)
    dense = bank.dense(inputs.x, inputs.topk_idx, inputs.topk_weights, options.experts)
    errors = {
        "layer": relative_error(collective_combine(y, handle), dense),
        "echo": relative_error(collective_combine(rows.x, handle), expected_echo(inputs, options)),
    }
    dist.destroy_process_group()
    return errors


def test_gloo_exchange_gives_the_dense_layer() -> None:
    options = BenchOptions(
        ranks=NUM_RANKS, tokens=30, hidden=HIDDEN, experts=NUM_EXPERTS, topk=3, dtype="fp32", routing="zipf"
    )
    results, _ = run_ranks(NUM_RANKS, options.to_json(), 120.0, lambda *_: None, module=__name__)
    assert len(results) == NUM_RANKS
    for errors in results:
        assert errors["layer"] < 1e-5
        assert errors["echo"] == 0.0


if __name__ == "__main__":
    print(json.dumps({"result": gloo_rank(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))}))
