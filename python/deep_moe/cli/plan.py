"""Prints a plan as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..planning import MIB, Plan


def show(found: Plan) -> str:
    """Returns the plan as lines of text."""
    work = found.work
    where = f"{work.ranks} ranks" + (f" on {work.nodes} nodes" if work.nodes > 1 else "")
    lines = [
        f"{where}, {found.gpu.name}: hidden {work.hidden}, {work.experts} experts, top {work.topk}"
        + (f", {work.topk_groups} of {work.groups} groups" if work.groups else ""),
        f"a token goes to {found.spread.ranks:.2f} ranks"
        + (f" on {found.spread.nodes:.2f} nodes" if work.nodes > 1 else ""),
        "",
    ]
    memory = [(part.name, f"{part.bytes / MIB:,.1f}", part.note) for part in found.memory]
    lines += _table(("memory of a rank", "MiB", ""), memory)
    times = [
        (
            bound.call,
            f"{bound.link_bytes / 1e6:,.1f}",
            f"{bound.network_bytes / 1e6:,.1f}",
            f"{bound.seconds * 1e6:,.1f}",
            bound.resource,
        )
        for bound in found.bounds
    ]
    lines += ["", *_table(("call", "NVLink, MB", "network, MB", "at least, us", "bound by"), times), ""]
    arguments = []
    if found.num_nvl_bytes:
        arguments.append(f"num_nvl_bytes={found.num_nvl_bytes}")
    if found.num_rdma_bytes:
        arguments += [f"num_rdma_bytes={found.num_rdma_bytes}", "low_latency_mode=True"]
    if found.num_nvl_bytes:
        lines.append(f"Buffer.set_num_sms({found.num_sms})")
    lines.append(f"Buffer(group, {', '.join(arguments)})")
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def to_json(found: Plan) -> str:
    """Returns the plan as JSON."""
    return json.dumps(found.to_dict(), indent=2)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of text; all but the first and the last that hold words are to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return lines
