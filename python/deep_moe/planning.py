"""How much memory and time a layer needs, computed: ``deep-moe plan`` as a function. Touches no GPU."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from ._C import low_latency_size_hint, received_bytes, workspace_bytes
from ._traffic import (
    Gpu,
    Spread,
    Work,
    find_gpu,
    link_bounds,
    ring_bytes,
    ring_bytes_within,
    ring_row,
    sm_seconds,
    sms_that_fill,
    spread,
)
from .cli.models import ModelShape, find_model

__all__ = ["Bound", "Memory", "Plan", "heap_after", "plan"]

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}  # bytes of an element as dispatched
MODES = ("ht", "ll", "both")
MIB = 1 << 20
MIN_SEGMENT = 4 * MIB
BLOCK = 256  # blocks of the heap are multiples of it
PAGE = 4096  # and segments of this
MIN_SMS = 8  # fewer were not measured to fill a link
MAX_RANKS_OF_A_DOMAIN = 64


@dataclass(frozen=True)
class Memory:
    """One buffer of a rank."""

    name: str
    """What lies there, such as "received rows"."""
    bytes: int
    """Its size."""
    note: str
    """When it is that large."""


@dataclass(frozen=True)
class Bound:
    """The least time of a call: that of its busiest resource."""

    call: str
    """"dispatch", "combine", "low-latency dispatch" or "low-latency combine"."""
    link_bytes: int
    """Bytes of a rank over NVLink, in one direction."""
    network_bytes: int
    """Bytes of a rank over the network, in one direction."""
    seconds: float
    """No call can be faster."""
    resource: str
    """What takes that long, such as "NVLink" or "network"."""


@dataclass(frozen=True)
class Plan:
    """What :func:`plan` found. Bytes are of one rank."""

    work: Work
    """The sizes planned for: ranks, nodes, tokens, hidden, experts, topk, groups, topk_groups."""
    gpu: Gpu
    """Its name, SMs and link rate."""
    nic: float
    """Bytes a second of the network for each GPU, one direction."""
    spread: Spread
    """Mean number of different ranks and nodes that a token goes to, its own included."""
    rows: int
    """That a rank receives in a high-throughput dispatch, the imbalance included."""
    worst_rows: int
    """The same if every token came to one rank."""
    num_sms: int
    """For ``Buffer.set_num_sms``: SMs that keep the busiest link busy."""
    num_nvl_bytes: int
    """For ``Buffer``; 0 in mode "ll"."""
    num_rdma_bytes: int
    """For ``Buffer``; 0 in mode "ht"."""
    memory: tuple[Memory, ...]
    """Every buffer of a rank."""
    bounds: tuple[Bound, ...]
    """The least time of each call."""
    notes: tuple[str, ...]
    """What is not measured, or limits the plan."""

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain numbers, texts, lists and dicts."""
        return asdict(self)


def heap_after(start: int, block: int) -> int:
    """Bytes of a heap that had ``start`` bytes, all free, once it has held a block of ``block`` bytes.

    A heap grows by one segment: what the block needs, or half of what is there, or 4 MiB, whichever is most,
    so that the number of segments stays logarithmic (cpp/runtime/heap.cc).
    """
    block = -(-max(block, 1) // BLOCK) * BLOCK
    if block <= start:
        return start
    half = -(-(start // 2) // BLOCK) * BLOCK
    return start + -(-max(block, MIN_SEGMENT, half) // PAGE) * PAGE


def plan(
    model: str | ModelShape | None = None,
    *,
    ranks: int,
    nodes: int = 1,
    tokens: int = 4096,
    ll_tokens: int = 128,
    hidden: int | None = None,
    num_experts: int | None = None,
    topk: int | None = None,
    groups: int | None = None,
    topk_groups: int | None = None,
    mode: str = "both",
    dtype: str = "fp8",
    gpu: str = "H200",
    nic_gbit: float = 400.0,
    imbalance: float = 1.25,
    live: int = 1,
) -> Plan:
    """Plans a Buffer for the MoE layer of a model.

    Args:
        model: a name of ``deep_moe.cli.models.load_models()``, in any case, or a shape; sizes that are given
            as well take the place of its own.
        ranks: R, over all nodes.
        nodes: N, a divisor of R; ranks of a node reach each other over NVLink.
        tokens: T of a rank in high-throughput calls.
        ll_tokens: M, the cap on T of low-latency calls.
        hidden, num_experts, topk, groups, topk_groups: the layer's sizes; groups 0: a gate without groups.
        mode: "ht", "ll" or "both".
        dtype: of dispatched rows: "bf16", "fp16", "fp32", or "fp8" with a float32 scale for 128 elements.
            Combine takes the same, after fp8 bf16.
        gpu: one of H200, H100, H800, H20, A100, A800, B200, GB200.
        nic_gbit: line rate of the network for each GPU, in Gbit/s.
        imbalance: rows of the busiest rank over the mean.
        live: dispatches whose rows are alive at the same time: 1 for inference, the layers of a pipeline
            stage where activations are kept for the backward pass.

    Returns:
        bytes of every buffer, lower bounds of time, and what to pass to
        ``Buffer(num_nvl_bytes=, num_rdma_bytes=)`` and ``Buffer.set_num_sms``.

    Raises:
        ValueError: a size that is missing or cannot be; the text names it.
    """
    shape = _shape(model, hidden, num_experts, topk, groups, topk_groups)
    _check(shape, ranks, nodes, tokens, ll_tokens, mode, dtype, nic_gbit, imbalance, live)
    found, nic = find_gpu(gpu), nic_gbit / 8 * 1e9
    work = Work(
        ranks, nodes, tokens, shape.hidden, shape.num_experts, shape.topk, shape.groups, shape.topk_groups
    )
    item = DTYPES[dtype]
    there = shape.hidden * item + (shape.hidden // 128 * 4 if dtype == "fp8" else 0)
    back = shape.hidden * (2 if dtype == "fp8" else item)
    memory: list[Memory] = [Memory("control words", workspace_bytes(ranks, True), "always")]
    bounds: list[Bound] = []
    to = spread(work)
    rows, worst = min(math.ceil(tokens * to.ranks * imbalance), ranks * tokens), ranks * tokens
    sms, heap, staging = MIN_SMS, 0, 0
    if mode != "ll":
        scales = there - shape.hidden * item
        heap, parts = _heap(work, shape.hidden * item, scales, back, rows, worst, live, imbalance)
        memory += parts
        sms = _sms(work, there, back, found, nic)
        bounds += [
            _bound("dispatch", work, there, False, False, found, nic, sms),
            _bound("combine", work, back, True, False, found, nic, sms),
        ]
    if mode != "ht":
        staging, parts = _low_latency_memory(work, ll_tokens, dtype)
        memory += parts
        few = replace(work, tokens=ll_tokens)
        bounds += [
            _bound("low-latency dispatch", few, there, False, True, found, nic, 0),
            _bound("low-latency combine", few, back, True, True, found, nic, 0),
        ]
    if nodes > 1:
        wanted = ring_bytes(work, back)
        if mode == "both":
            staging = max(staging, wanted)
        memory.append(_rings(work, wanted, staging))
    return Plan(
        work,
        found,
        nic,
        to,
        rows,
        worst,
        sms,
        heap,
        staging,
        tuple(memory),
        tuple(bounds),
        tuple(_notes(work, found, dtype)),
    )


def _heap(
    work: Work, row: int, scales: int, back: int, rows: int, worst: int, live: int, imbalance: float
) -> tuple[int, list[Memory]]:
    """num_nvl_bytes, and what lies in the heap in high-throughput mode."""
    received = received_bytes(rows, row, scales, work.topk)
    staged = -(-rows * back // BLOCK) * BLOCK
    heap = -(-(live * received + staged) // MIB) * MIB
    worst_bytes = received_bytes(worst, row, scales, work.topk)
    grown = heap_after(heap, worst_bytes)
    by_expert = math.ceil(work.tokens * work.topk * imbalance)
    parts = [
        Memory("received rows", received, f"{rows:,} rows with ids, weights, sources"),
        Memory(
            "combine input", staged, "a copy, unless it lies in the heap (Buffer.empty, or received rows)"
        ),
        Memory(
            "handle", 5 * work.tokens * work.ranks + 4 * work.ranks**2 + 4 * rows, "for each dispatch alive"
        ),
        Memory(
            "rows by expert",
            by_expert * (row + scales + 8) + 4 * rows * work.topk,
            f"{by_expert:,} rows more, where dispatch has expert_major=True",
        ),
        Memory("received rows, worst", worst_bytes, f"all {worst:,} tokens come to one rank"),
        Memory("heap, worst", grown, "what num_nvl_bytes has grown to then"),
    ]
    return heap, parts


def _rings(work: Work, wanted: int, staging: int) -> Memory:
    """The rings of a Buffer between nodes, which takes num_rdma_bytes for them too."""
    if not staging:
        return Memory("rings between nodes", wanted, "whatever the number of tokens")
    return Memory(
        "rings between nodes", ring_bytes_within(work, staging), "num_rdma_bytes once more, to 4 MiB a slot"
    )


def _low_latency_memory(work: Work, max_tokens: int, dtype: str) -> tuple[int, list[Memory]]:
    """num_rdma_bytes, and the tensors of low-latency mode."""
    staging = low_latency_size_hint(max_tokens, work.hidden, work.ranks, work.experts)
    owned = -(-work.experts // work.ranks)
    elements = owned * work.ranks * max_tokens * work.hidden
    received = elements * DTYPES[dtype] + (elements // 128 * 4 if dtype == "fp8" else 0)
    shape = f"[{owned}, {work.ranks * max_tokens}, {work.hidden}]"
    sent = staging - staging // work.nodes
    between = [Memory("low-latency rows, sent", sent, "to ranks of other nodes")] if sent > 0 else []
    return staging, [
        Memory("low-latency staging", staging, f"four slots for up to {max_tokens} tokens a rank"),
        *between,
        Memory("low-latency rows", received, f"{shape} of {dtype}, an ordinary tensor"),
        Memory("low-latency combine input", elements * max(2, DTYPES[dtype]), f"{shape}, an ordinary tensor"),
    ]


def _row(work: Work, row: int, back: bool) -> int:
    """Bytes of a row as it travels in high-throughput mode, in dispatch with ids, weights and the source."""
    if work.nodes > 1:
        return ring_row(work, row, not back)
    return row if back else row + 12 * work.topk + 4


def _sms(work: Work, there: int, back: int, gpu: Gpu, nic: float) -> int:
    """An even number of SMs that keeps the busiest link of dispatch and of combine busy."""
    wanted = MIN_SMS
    for row, is_back in ((there, False), (back, True)):
        row = _row(work, row, is_back)
        links = link_bounds(work, row, is_back, False, gpu, nic)
        wanted = max(wanted, sms_that_fill(work, row, is_back, gpu, max(time for _, time in links.values())))
    return min(-(-wanted // 2) * 2, gpu.sms)


def _bound(
    call: str, work: Work, row: int, back: bool, low_latency: bool, gpu: Gpu, nic: float, sms: int
) -> Bound:
    row = row if low_latency else _row(work, row, back)
    links = link_bounds(work, row, back, low_latency, gpu, nic)
    times = {name: time for name, (_, time) in links.items()}
    if not low_latency:
        times |= sm_seconds(work, row, back, gpu, sms)
    resource = max(times, key=lambda name: times[name])
    return Bound(call, round(links["NVLink"][0]), round(links["network"][0]), times[resource], resource)


def _notes(work: Work, gpu: Gpu, dtype: str) -> list[str]:
    notes = []
    if not gpu.measured:
        notes.append(f"{gpu.name}: link rates scaled from those measured on H200, SM rates taken from it")
    if work.nodes > 1:
        notes.append("between nodes: a model, compared with published figures in docs/internode-times.md")
    if work.local > MAX_RANKS_OF_A_DOMAIN:
        notes.append(f"GPUs: at most {MAX_RANKS_OF_A_DOMAIN} ranks in one NVLink domain, here {work.local}")
    if dtype == "fp8":
        notes.append("combine moves bf16 rows")
    return notes


def _shape(
    model: str | ModelShape | None,
    hidden: int | None,
    num_experts: int | None,
    topk: int | None,
    groups: int | None,
    topk_groups: int | None,
) -> ModelShape:
    given = {"hidden": hidden, "num_experts": num_experts, "topk": topk}
    if model is None:
        missing = [name for name, value in given.items() if value is None]
        if missing:
            raise ValueError(f"{', '.join(missing)}: missing; give a model's name, or all sizes of the layer")
        base = ModelShape("", 0, 0, 0, 0, 0)
    else:
        base = find_model(model) if isinstance(model, str) else model
    chosen: dict[str, Any] = given | {"groups": groups, "topk_groups": topk_groups}
    return replace(base, **{name: value for name, value in chosen.items() if value is not None})


def _check(
    shape: ModelShape,
    ranks: int,
    nodes: int,
    tokens: int,
    ll_tokens: int,
    mode: str,
    dtype: str,
    nic_gbit: float,
    imbalance: float,
    live: int,
) -> None:
    sizes = {
        "ranks": ranks,
        "nodes": nodes,
        "tokens": tokens,
        "ll_tokens": ll_tokens,
        "hidden": shape.hidden,
        "num_experts": shape.num_experts,
        "topk": shape.topk,
        "live": live,
    }
    for name, size in sizes.items():
        _require(isinstance(size, int) and size >= 1, name, size, "whole numbers from 1")
    _require(ranks <= 1024, "ranks", ranks, "1 to 1024")
    _require(ranks % nodes == 0, "nodes", nodes, f"divisors of {ranks}, the number of ranks")
    _require(shape.topk <= min(shape.num_experts, 1024), "topk", shape.topk, f"1 to {shape.num_experts}")
    _require(mode in MODES, "mode", mode, ", ".join(MODES))
    _require(dtype in DTYPES, "dtype", dtype, ", ".join(DTYPES))
    _require(dtype != "fp8" or shape.hidden % 128 == 0, "hidden", shape.hidden, "multiples of 128 with fp8")
    _require(nic_gbit > 0, "nic_gbit", nic_gbit, "Gbit/s above 0")
    _require(imbalance >= 1, "imbalance", imbalance, "1 or more")
    if shape.groups:
        _require(
            shape.num_experts % shape.groups == 0, "groups", shape.groups, f"divisors of {shape.num_experts}"
        )
        _require(
            1 <= shape.topk_groups <= shape.groups, "topk_groups", shape.topk_groups, f"1 to {shape.groups}"
        )
        room = shape.topk_groups * (shape.num_experts // shape.groups)
        _require(shape.topk <= room, "topk", shape.topk, f"1 to {room}, the experts of the chosen groups")


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name}: got {value}; allowed: {allowed}")
