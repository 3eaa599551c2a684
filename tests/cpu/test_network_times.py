"""The closed model of times between nodes: against published figures, itself, and the page that shows it."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from docs.models import network_times as model

DOCS = Path(model.__file__).parents[1]
WORST_ERROR = 0.12  # as docs/internode-times.md says
V3 = model.Work(64, 4096, groups=8, topk_groups=4)


@pytest.mark.parametrize("row", model.comparisons(), ids=lambda row: row.what)
def test_published_figure_is_predicted(row: model.Comparison) -> None:
    assert abs(row.error) <= WORST_ERROR, f"{row.predicted:.1f} instead of {row.published} {row.unit}"


def test_page_says_the_worst_error() -> None:
    assert f"more than {WORST_ERROR:.0%}".replace("%", " %") in (DOCS / "internode-times.md").read_text()


def test_page_shows_what_the_command_prints() -> None:
    command = [sys.executable, DOCS / "models" / "network_times.py"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    page = (DOCS / "internode-times.md").read_text().splitlines()
    assert [line for line in printed.splitlines() if line.startswith("|") and line not in page] == []


@pytest.mark.parametrize("ranks", [16, 64, 256])
def test_spread_is_the_closed_form(ranks: int) -> None:
    E, K = 256, 8
    expected = ranks * (1 - math.comb(E - E // ranks, K) / math.comb(E, K))
    assert model.spread(model.Work(ranks, 1)).ranks == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("ranks", [32, 64, 128])
def test_groups_keep_nodes_few(ranks: int) -> None:
    limited = replace(V3, ranks=ranks)
    free = replace(limited, groups=0, topk_groups=0)
    assert model.spread(limited).nodes < 0.9 * model.spread(free).nodes
    assert model.ht_time(limited, "dispatch").wire_bytes < 0.9 * model.ht_time(free, "dispatch").wire_bytes


def test_memory_does_not_grow_with_tokens() -> None:
    assert model.ht_bytes(V3) == model.ht_bytes(replace(V3, tokens=1 << 20))


@pytest.mark.parametrize(
    ("machine", "bound"),
    [
        (replace(model.H200, nvlink_push=20e9), "NVLink"),
        (replace(model.H200, sm_store=2e9), "SM stores"),
        (replace(model.H200, sm_load=2e9), "SM loads"),
        (replace(model.H200, network_one_way=1e-3), "credits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_slower_resource_becomes_the_bound(machine: model.Machine, bound: str) -> None:
    before, after = model.ht_time(V3, "dispatch"), model.ht_time(V3, "dispatch", machine)
    assert (before.bound, after.bound) == ("network", bound)
    assert after.seconds > before.seconds
