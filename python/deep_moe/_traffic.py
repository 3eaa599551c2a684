"""How many rows cross which link, and how long that takes at least: the formulas of :mod:`deep_moe.planning`.

R ranks on N nodes, P = R / N ranks a node; T tokens of a rank, K experts a token of E; r and n: the different
ranks and nodes that a token goes to, its own included, on average; b: bytes of a row with what goes with it.
Experts are taken to be equally likely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

__all__ = [
    "GPUS",
    "Gpu",
    "Spread",
    "Work",
    "find_gpu",
    "link_bounds",
    "ring_bytes",
    "sm_seconds",
    "sms_that_fill",
    "spread",
]

SAMPLES = 4096  # tokens of which the routing is drawn where there are groups
NIC_SHARE = 0.9  # of the line: DeepEP V2 on two nodes moves 45 of 50 GB/s (docs/internode-times.md)


@dataclass(frozen=True)
class Gpu:
    """Speeds of one GPU in bytes a second and one direction.

    Measured on two H200 whose links carry 450 GB/s: stores to the peer 350, loads from it 322 GB/s; one SM
    stores 51 and loads 80 GB/s (this project's kernels, docs/internode-times.md). Others are scaled by their
    links' rate.
    """

    name: str
    sms: int
    link: float  # NVLink's nominal rate, one direction
    measured: bool = False

    @property
    def push(self) -> float:
        """Stores to peers."""
        return self.link * 350 / 450

    @property
    def pull(self) -> float:
        """Loads from peers."""
        return self.link * 322 / 450

    sm_store = 51e9
    sm_load = 80e9


# SMs and NVLink rates: NVIDIA's data sheets, half of "bidirectional".
GPUS = (
    Gpu("H200", 132, 450e9, measured=True),
    Gpu("H100", 132, 450e9),
    Gpu("H800", 132, 200e9),
    Gpu("H20", 78, 450e9),
    Gpu("A100", 108, 300e9),
    Gpu("A800", 108, 200e9),
    Gpu("B200", 148, 900e9),
    Gpu("GB200", 148, 900e9),
)


def find_gpu(name: str) -> Gpu:
    """The GPU called ``name`` in any case."""
    for gpu in GPUS:
        if gpu.name.lower() == name.lower():
            return gpu
    raise ValueError(f"gpu: got {name!r}; known are {', '.join(gpu.name for gpu in GPUS)}")


@dataclass(frozen=True)
class Work:
    """What one rank does in a call."""

    ranks: int
    nodes: int
    tokens: int
    hidden: int
    experts: int
    topk: int
    groups: int = 0
    topk_groups: int = 0

    @property
    def local(self) -> int:
        """Ranks of a node."""
        return self.ranks // self.nodes


@dataclass(frozen=True)
class Spread:
    """Mean number of different nodes and ranks that a token goes to, its own included."""

    nodes: float
    ranks: float


@cache
def spread(work: Work) -> Spread:
    """n and r of equally likely experts.

    Without groups: the sum over ranks (nodes) with e experts of 1 - C(E - e, K) / C(E, K), the chance that
    one of K different experts is there. With groups the routes of 4096 tokens are drawn: experts of the
    groups whose best expert is best, as in DeepEP's tests.
    """
    each, extra = divmod(work.experts, work.ranks)
    of_rank = [each + (rank < extra) for rank in range(work.ranks)]
    of_node = [sum(of_rank[at : at + work.local]) for at in range(0, work.ranks, work.local)]
    if not work.groups:
        all_ways = math.comb(work.experts, work.topk)

        def reached(owned: list[int]) -> float:
            return sum(1 - math.comb(work.experts - e, work.topk) / all_ways for e in owned)

        return Spread(reached(of_node), reached(of_rank))
    scores = np.random.default_rng(7).random((SAMPLES, work.experts))
    by_group = scores.reshape(SAMPLES, work.groups, -1)
    best = np.argsort(-by_group.max(2), axis=1)[:, : work.topk_groups]
    allowed = np.zeros((SAMPLES, work.groups), bool)
    np.put_along_axis(allowed, best, True, axis=1)
    scores = np.where(allowed[:, :, None], by_group, -1).reshape(SAMPLES, -1)
    chosen = np.argpartition(-scores, work.topk - 1, axis=1)[:, : work.topk]
    owner = np.repeat(np.arange(work.ranks), of_rank)[chosen]

    def different(values: np.ndarray) -> float:
        ordered = np.sort(values, axis=1)
        return float(1 + (np.diff(ordered, axis=1) > 0).sum(1).mean())

    return Spread(different(owner // work.local), different(owner))


def link_bounds(
    work: Work, row: int, back: bool, low_latency: bool, gpu: Gpu, nic: float
) -> dict[str, tuple[float, float]]:
    """Bytes over the network and over NVLink, and the seconds that they take at least; of dispatch, or back.

    ::

        high throughput   network   T n (1 - 1/N) b     a row once a node, to the GPU of the same local rank
                          NVLink    T r (1 - 1/P) b     each row that a node keeps, to its ranks
        low latency       network   T r (1 - 1/N) b     a row once a rank
                          NVLink    T r / N (1 - 1/P) b

    On one node both give T r (1 - 1/R) b over NVLink. Stores to peers (dispatch) and loads from them
    (combine) have their own rates. docs/internode-times.md compares these terms with published figures.
    """
    to = spread(work)
    rows = work.tokens * (to.ranks if low_latency else to.nodes) * (1 - 1 / work.nodes)
    near = work.tokens * to.ranks * (1 - 1 / work.local) / (work.nodes if low_latency else 1)
    return {
        "network": (rows * row, rows * row / (nic * NIC_SHARE)),
        "NVLink": (near * row, near * row / (gpu.pull if back else gpu.push)),
    }


def _stored_and_loaded(work: Work, row: int, back: bool) -> tuple[float, float]:
    """Bytes that this rank's SMs store and load in a high-throughput call.

    ::

        stores   dispatch T (n (1 - 1/N) + r) b     combine T (n (1 - 1/N) + 1) b
        loads    dispatch and combine T (n (1 - 1/N) + r) b; on one node dispatch loads each row once: T b
    """
    to = spread(work)
    far = to.nodes * (1 - 1 / work.nodes)
    stores = far + (1 if back else to.ranks)
    loads = far + (1 if work.nodes == 1 and not back else to.ranks)
    return work.tokens * stores * row, work.tokens * loads * row


def sm_seconds(work: Work, row: int, back: bool, gpu: Gpu, sms: int) -> dict[str, float]:
    """Seconds that ``sms`` SMs need at least for what they store and for what they load."""
    stored, loaded = _stored_and_loaded(work, row, back)
    return {"SM stores": stored / (gpu.sm_store * sms), "SM loads": loaded / (gpu.sm_load * sms)}


def sms_that_fill(work: Work, row: int, back: bool, gpu: Gpu, seconds: float) -> int:
    """SMs with which neither their stores nor their loads take longer than the links' ``seconds``."""
    alone = sm_seconds(work, row, back, gpu, 1)
    return max(1, math.ceil(max(alone.values()) / seconds)) if seconds > 0 else 1


# ---- memory between nodes ----
CHUNK_ROWS = 8
NOTIFY_DEPTH = 8
ANNOUNCE = 640
MAX_SLOT = 4 << 20  # a slot is not made larger than this, however large num_rdma_bytes is


def _align(size: int, to: int) -> int:
    return -(-size // to) * to


def ring_row(work: Work, row: int, ids: bool) -> int:
    """Bytes of a row in a ring: with ids also K ids, weights and the row's place on each rank of the node."""
    return _align(row + (work.topk * 12 + 4 + 4 * work.local if ids else 0), 16)


def ring_bytes(work: Work, row: int) -> int:
    """Symmetric memory of the rings between nodes, whatever T is (docs/internode.md, docs/models).

    N - 1 rings in each direction, of max(4, 128 / (N - 1)) slots of 8 rows; words; notify's records.
    """
    return _ring_slots(work) * (CHUNK_ROWS * ring_row(work, row, True) + 256) + _ring_words(work)


def ring_bytes_within(work: Work, num_rdma_bytes: int) -> int:
    """The same of a Buffer that was given this number, for low-latency calls say."""
    return min(num_rdma_bytes, _ring_slots(work) * MAX_SLOT + _ring_words(work))


def _ring_slots(work: Work) -> int:
    peers = work.nodes - 1
    return 2 * peers * max(4, 128 // peers) if peers else 0


def _ring_words(work: Work) -> int:
    counts = ANNOUNCE + 4 * work.local + 4 * math.ceil(work.experts / work.nodes)
    return _ring_slots(work) * 8 + 2 * NOTIFY_DEPTH * (work.nodes - 1) * _align(counts, 64)
