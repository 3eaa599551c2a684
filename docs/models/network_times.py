"""Predicts times and buffer bytes between nodes: ``python docs/models/network_times.py``.

A closed model: the bytes over each resource divided by its measured speed; the slowest resource; fixed terms.
It is checked by giving it DeepEP V1's protocol and comparing with the published tables, to which only the
EP8 rows were fitted. docs/internode-times.md has the formulas, the sources and the output.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

US = 1e-6
LOCAL = 8  # ranks a node
SAMPLES = 4096  # tokens of which the routing is drawn


@dataclass(frozen=True)
class Machine:
    """Speeds in bytes a second, times in seconds."""

    nic: float
    nvlink_push: float
    nvlink_pull: float
    sm_store: float  # of one SM, to all destinations together
    sm_load: float
    network_one_way: float  # put with signal, a few bytes
    nvlink_one_way: float
    local_notify: float  # layout and notify inside a node
    local_low_latency: float  # half of a low-latency pair of one token inside a node


# NIC: DeepEP V2, two nodes, dispatch: 90 GB/s of rows kept, half of which cross: 45 of 50 GB/s (400 Gb/s).
# Network latency: half the round trip of 16.7 us of a put with signal (GPU-initiated, arXiv:2511.15076).
# NVLink, SMs, notify, low latency: this project's trial kernels on two H200.
H200 = Machine(
    nic=45e9,
    nvlink_push=350e9,
    nvlink_pull=322e9,
    sm_store=51e9,
    sm_load=80e9,
    network_one_way=8.35 * US,
    nvlink_one_way=1.21 * US,
    local_notify=6.9 * US,
    local_low_latency=3.3 * US,
)


@dataclass(frozen=True)
class Work:
    """One call of one rank."""

    ranks: int
    tokens: int
    hidden: int = 7168
    topk: int = 8
    experts: int = 256
    groups: int = 0  # of experts; 0: gating without groups
    topk_groups: int = 0

    @property
    def nodes(self) -> int:
        return self.ranks // LOCAL

    @property
    def fp8_row(self) -> int:
        return self.hidden + self.hidden // 128 * 4

    @property
    def bf16_row(self) -> int:
        return 2 * self.hidden


@dataclass(frozen=True)
class Spread:
    """Mean number of different nodes and of different ranks that a token goes to, its own included."""

    nodes: float
    ranks: float


@cache
def spread(work: Work) -> Spread:
    """Equally likely experts; with groups, of those whose best experts are best, as in DeepEP's tests."""
    scores = np.random.default_rng(7).random((SAMPLES, work.experts))
    if work.groups:
        by_group = scores.reshape(SAMPLES, work.groups, -1)
        best = np.argsort(-by_group.max(2), axis=1)[:, : work.topk_groups]
        allowed = np.zeros((SAMPLES, work.groups), bool)
        np.put_along_axis(allowed, best, True, axis=1)
        scores = np.where(allowed[:, :, None], by_group, -1).reshape(SAMPLES, -1)
    chosen = np.argpartition(-scores, work.topk - 1, axis=1)[:, : work.topk]
    owner = chosen * work.ranks // work.experts

    def different(values: np.ndarray) -> float:
        ordered = np.sort(values, axis=1)
        return float(1 + (np.diff(ordered, axis=1) > 0).sum(1).mean())

    return Spread(different(owner // LOCAL), different(owner))


# ---- DeepEP V1 ----
# NVLink of H800, from the published EP8 rows: 153 and 158 GB/s of rows kept, 7/8 of which cross.
V1_NVLINK = {"dispatch": 153e9 * 7 / 8, "combine": 158e9 * 7 / 8}
V1_EP8_LL = {"dispatch": 77 * US, "combine": 114 * US}
V1_META = 8 * 8 + 8 * 4 + 8  # ids, weights, source
HT_PUBLISHED = {16: (43, 43), 32: (58, 57), 64: (51, 50)}  # dispatch, combine: GB/s
LL_PUBLISHED = {16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}  # us


def v1_ht_work(ranks: int) -> Work:
    nodes = ranks // LOCAL
    return Work(ranks, 4096, groups=nodes, topk_groups=min(nodes, 4))


def v1_ht_bandwidth(ranks: int, call: str) -> float:
    """GB/s as published: rows a token has on nodes, its own node included, over the time."""
    work = v1_ht_work(ranks)
    to = spread(work)
    row = work.fp8_row if call == "dispatch" else work.bf16_row
    wire = work.tokens * to.nodes * (1 - 1 / work.nodes) * (row + V1_META) / H200.nic
    nvlink = work.tokens * to.ranks * (1 - 1 / LOCAL) * (row + V1_META) / V1_NVLINK[call]
    return work.tokens * to.nodes * row / max(wire, nvlink) / 1e9


def v1_ll_time(ranks: int, call: str) -> float:
    """One message a (token, expert), over NVLink inside the node; and a fixed part, from the EP8 row."""
    work = Work(ranks, 128)
    row = work.fp8_row + 16 if call == "dispatch" else work.bf16_row
    messages = work.tokens * work.topk

    def moving(n: int) -> float:
        nvlink = messages * (LOCAL - 1) / n * row / V1_NVLINK[call]
        return max(nvlink, messages * (1 - LOCAL / n) * row / H200.nic)

    return V1_EP8_LL[call] - moving(8) + moving(ranks)


@dataclass(frozen=True)
class Comparison:
    what: str
    unit: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def comparisons() -> list[Comparison]:
    rows = []
    for i, call in enumerate(("dispatch", "combine")):
        for ranks, given in HT_PUBLISHED.items():
            rows.append(Comparison(f"HT {call} EP{ranks}", "GB/s", given[i], v1_ht_bandwidth(ranks, call)))
        for ranks, given in LL_PUBLISHED.items():
            rows.append(Comparison(f"LL {call} EP{ranks}", "us", given[i], v1_ll_time(ranks, call) / US))
    return rows


# ---- deep_moe ----
CHUNK_ROWS = 8
LL_SLOTS = 4
NOTIFY_DEPTH = 8
ANNOUNCE = 640


def align(size: int, to: int) -> int:
    return -(-size // to) * to


def ring_slots(nodes: int) -> int:
    """Slots of a ring: few peers need deep rings to fill the network, many share it."""
    return max(4, 128 // (nodes - 1))


def ring_row(work: Work, row: int, ids: bool = True) -> int:
    """Dispatch: row, ids, weights, token, positions; combine: the row and, with ids, summed weights."""
    return align(row + (work.topk * 12 + 4 + 4 * LOCAL if ids else 0), 16)


@dataclass(frozen=True)
class Prediction:
    seconds: float
    bound: str  # the resource that is busy longest
    wire_bytes: float


def slowest(busy: dict[str, float], fixed: float, wire_bytes: float) -> Prediction:
    bound = max(busy, key=lambda name: busy[name])
    return Prediction(busy[bound] + fixed, bound, wire_bytes)


def ht_time(work: Work, call: str, machine: Machine = H200, sms: int = 16) -> Prediction:
    to = spread(work)
    fp8 = call == "dispatch"
    row = ring_row(work, work.fp8_row if fp8 else work.bf16_row, ids=fp8)
    remote = work.tokens * to.nodes * (1 - 1 / work.nodes)  # rows to or from other nodes
    kept = work.tokens * to.ranks  # rows that this rank pushes to its node's ranks, or pulls from them
    in_ring = ring_slots(work.nodes) * CHUNK_ROWS
    chunk = CHUNK_ROWS * row
    cycle = 2 * machine.network_one_way + chunk / machine.nic + chunk / machine.sm_store
    stores = remote + kept if fp8 else remote + work.tokens
    busy = {
        "network": remote * row / machine.nic,
        "NVLink": kept * (1 - 1 / LOCAL) * row / (machine.nvlink_push if fp8 else machine.nvlink_pull),
        "SM stores": stores * row / machine.sm_store / sms,
        "SM loads": (remote + kept) * row / machine.sm_load / sms,
        "credits": remote / (work.nodes - 1) / in_ring * cycle,
    }
    announce = machine.local_notify if fp8 else machine.nvlink_one_way
    gate = announce + machine.network_one_way + machine.nvlink_one_way
    fill = machine.network_one_way + chunk / machine.nic + chunk / machine.sm_store + machine.nvlink_one_way
    return slowest(busy, gate + fill, remote * row)


def ll_row(work: Work, row: int) -> int:
    return align(align(row, 16) + 4 + 8 * work.topk, 64)


def ll_time(
    work: Work, call: str, machine: Machine = H200, sms: int = 132, by_node: bool = False
) -> Prediction:
    """One message a rank; combine sends one pre-reduced row a (token, rank).

    ``by_node``: one row a (token, node) over the rail instead, forwarded and summed over NVLink.
    """
    to = spread(work)
    row = ll_row(work, work.fp8_row) if call == "dispatch" else align(work.bf16_row, 64)
    rows = work.tokens * to.ranks
    remote = (work.tokens * to.nodes if by_node else rows) * (1 - 1 / work.nodes)
    near = (rows if by_node else rows / work.nodes) * (1 - 1 / LOCAL)
    speed = machine.nvlink_push if call == "dispatch" else machine.nvlink_pull
    busy = {"network": remote * row / machine.nic, "NVLink": near * row / speed}
    stage = rows * row / (machine.sm_store * sms)  # before the first put to a destination can go
    take = work.tokens * work.topk * row / (machine.sm_store * sms)  # expand, or read the experts' rows
    fixed = machine.local_low_latency + machine.network_one_way + stage + take
    if by_node:
        fixed += stage + machine.nvlink_one_way
    return slowest(busy, fixed, remote * row)


def ht_bytes(work: Work) -> int:
    """Rings, received and to send, and words: symmetric memory of one rank, whatever T is."""
    peers = work.nodes - 1
    rings = 2 * peers * ring_slots(work.nodes) * (CHUNK_ROWS * ring_row(work, work.bf16_row) + 256)
    counts = ANNOUNCE + 4 * LOCAL + 4 * math.ceil(work.experts / work.nodes)
    words = 2 * peers * ring_slots(work.nodes) * 8
    return rings + words + 2 * NOTIFY_DEPTH * peers * align(counts, 64)


def ll_bytes(work: Work, max_tokens: int) -> int:
    """Four slots of a part a rank to receive into, and of what one call sends at most."""
    row = max(ll_row(work, work.bf16_row), align(work.bf16_row, 64))
    send = max_tokens * min(work.topk, work.ranks) * row
    return LL_SLOTS * (work.ranks * align(max_tokens * row, 256) + send) + 3 * LL_SLOTS * work.ranks * 8


# ---- output ----
RANKS = (16, 32, 64, 128, 256, 512, 1024)


def at(work: Work, ranks: int) -> Work:
    """At least one expert a rank, as where experts are replicated."""
    return replace(work, ranks=ranks, experts=max(work.experts, ranks))


def show(header: str, rows: list[list[str]]) -> None:
    columns = header.split(" | ")
    print(f"| {header} |")
    print(f"|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--groups", type=int, default=8, help="0: gating without groups")
    parser.add_argument("--topk-groups", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096, help="of high-throughput calls")
    parser.add_argument("--ll-tokens", type=int, default=128)
    parser.add_argument("--sms", type=int, default=16, help="of high-throughput calls")
    args = parser.parse_args()

    print("DeepEP V1, published and predicted\n")
    show(
        "call | published | predicted | error",
        [
            [c.what, f"{c.published:g} {c.unit}", f"{c.predicted:.1f} {c.unit}", f"{c.error:+.1%}"]
            for c in comparisons()
        ],
    )
    base = Work(16, args.tokens, args.hidden, args.topk, args.experts)
    for groups, topk_groups in sorted({(args.groups, args.topk_groups), (0, 0)}, reverse=True):
        gating = f"{topk_groups} of {groups} groups" if groups else "no groups"
        print(f"deep_moe, high throughput, {gating}\n")
        rows = []
        for ranks in RANKS:
            work = replace(at(base, ranks), groups=groups, topk_groups=topk_groups)
            to, there = spread(work), ht_time(work, "dispatch", sms=args.sms)
            back = ht_time(work, "combine", sms=args.sms)
            cells = [f"{ranks}", f"{to.nodes:.2f}", f"{to.ranks:.2f}"]
            cells += [f"{there.seconds / US:.0f}", there.bound, f"{back.seconds / US:.0f}", back.bound]
            rows.append([*cells, f"{ht_bytes(work) / 2**20:.0f}"])
        show("ranks | nodes a token | ranks a token | dispatch, us | bound | combine, us | bound | MiB", rows)
        print(f"deep_moe, low latency, {gating}\n")
        rows = []
        for ranks in RANKS:
            work = at(replace(base, tokens=args.ll_tokens, groups=groups, topk_groups=topk_groups), ranks)
            cells = [f"{ranks}", f"{spread(work).ranks:.2f}"]
            for by_node in (False, True):
                for call in ("dispatch", "combine"):
                    cells.append(f"{ll_time(work, call, by_node=by_node).seconds / US:.0f}")
            rows.append([*cells, f"{ll_bytes(work, args.ll_tokens) / 2**20:.0f}"])
        show("ranks | ranks a token | dispatch, us | combine, us | by node: dispatch | combine | MiB", rows)


if __name__ == "__main__":
    main()
