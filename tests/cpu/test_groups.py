"""Buffers over torch's own process groups (gloo): default, sub, lazily connected, in spawned processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

import deep_moe

from ..support.attempts import good_program
from ..support.program import check, execute
from ..support.ranks import run_ranks
from ..support.wire import dumps, loads


def init(rank: int, ranks: int, store: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    return dist.group.WORLD


@pytest.mark.parametrize("connected", ["connected", "not yet connected"])
def test_default_group(connected: str, tmp_path: Path) -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        if connected == "not yet connected":
            os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
        group = init(rank, 3, tmp_path / "store")
        buffer = deep_moe.Buffer(group, timeout=20)
        assert buffer.group is group and (buffer.rank, buffer.group_size) == (rank, 3)
        return execute(good_program(3), rank, [buffer])

    check(good_program(3), run_ranks(rank_main, 3))


def test_group_is_used_in_the_constructor_alone(tmp_path: Path) -> None:
    """Its end, and the user's own collectives in between, do not matter to the Buffer."""

    def rank_main(comm: Any, rank: int) -> Any:
        group = init(rank, 2, tmp_path / "store")
        buffer = deep_moe.Buffer(group, timeout=20)
        total = torch.ones(4) * rank
        first = execute(good_program(), rank, [buffer])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.tolist(), first, execute(good_program(), rank, [buffer])

    results = run_ranks(rank_main, 2)
    assert all(total == [1.0] * 4 for total, _, _ in results)
    for which in (1, 2):
        check(good_program(), [result[which] for result in results])


def test_destroyed_buffer_lets_go_of_its_group(tmp_path: Path) -> None:
    """Else torch's group and its threads outlive destroy_process_group(), and run into the end of Python."""

    def of_gloo() -> int:
        names = (task / "comm" for task in Path("/proc/self/task").iterdir())
        return sum("gloo" in name.read_text() for name in names)

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(init(rank, 2, tmp_path / "store"), timeout=20)
        execute(good_program(), rank, [buffer])
        before = of_gloo()
        buffer.destroy()
        dist.destroy_process_group()
        return before, of_gloo(), buffer.group

    for before, after, group in run_ranks(rank_main, 2):
        assert before > 0 and after == 0 and group is None


def test_subgroups_side_by_side(tmp_path: Path) -> None:
    """Ranks 0, 2 and ranks 1, 3 of one world: two groups, whose ranks count from zero, beside the world."""

    def rank_main(comm: Any, rank: int) -> Any:
        world = init(rank, 4, tmp_path / "store")
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        inner = deep_moe.Buffer(groups[rank % 2], timeout=20)
        outer = deep_moe.Buffer(world, timeout=20)
        assert (inner.rank, inner.group_size, outer.rank) == (rank // 2, 2, rank)
        return execute(good_program(), inner.rank, [inner]), execute(good_program(4), rank, [outer])

    results = run_ranks(rank_main, 4)
    for members in ((0, 2), (1, 3)):
        check(good_program(), [results[rank][0] for rank in members])
    check(good_program(4), [outer for _, outer in results])


def test_constructor_is_told_of_wrong_arguments_through_a_group(tmp_path: Path) -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        group = init(rank, 2, tmp_path / "store")
        try:
            deep_moe.Buffer(group, num_nvl_bytes=-1.0 if rank == 0 else 0)
        except (ValueError, deep_moe.PeerRefusedError) as error:
            return type(error).__name__, str(error)
        return None

    first, second = run_ranks(rank_main, 2)
    assert first[0] == "ValueError" and "num_nvl_bytes" in first[1]
    assert second[0] == "PeerRefusedError" and "rank 0" in second[1] and "num_nvl_bytes" in second[1]


def spawned(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    group = init(rank, ranks, Path(folder) / "store")
    results = execute(good_program(ranks), rank, [deep_moe.Buffer(group, timeout=60)])
    (Path(folder) / f"rank{rank}").write_bytes(dumps(results))
    dist.destroy_process_group()


@pytest.mark.slow
def test_spawned_processes(tmp_path: Path) -> None:
    """Ranks that share no memory of an interpreter, as launchers start them."""
    torch.multiprocessing.spawn(spawned, (2, str(tmp_path)), nprocs=2)
    check(good_program(), [loads((tmp_path / f"rank{rank}").read_bytes()) for rank in range(2)])
