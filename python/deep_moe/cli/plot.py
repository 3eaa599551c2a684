"""Charts: bars for one run, curves over tokens or SMs for several."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .gpu_plan import COMBINE, DISPATCH, PAIR
from .report import Row, describe_run, drawn_rows
from .runs import Document, Measure, measures, options_of

STEPS = (DISPATCH.name, COMBINE.name, PAIR.name)
STYLES = {"(graph)": "--", "(Python)": ":"}


def require_matplotlib() -> None:
    """Raises ValueError that says what to install if there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plot: it needs matplotlib; run: pip install matplotlib")


@dataclass(frozen=True)
class Curve:
    """Times over ``x``; ``shares`` of the plain copy's speed, None where there is none."""

    label: str
    x: list[int]
    us: list[float]
    shares: list[float | None]


def curves(documents: Sequence[Document]) -> tuple[str, list[Curve]]:
    """What the x axis is, and the curves of two points or more, or none.

    Over tokens for several runs, and for low-latency calls alone; over SMs for one run with other rows.
    """
    found = [one for document in documents for one in measures(document) if _is_drawn(one)]
    if len(documents) == 1 and documents[0]["rows"]:
        return "SMs a rank", _curves(found, "num_sms")
    return "tokens a rank", _curves(found, "tokens")


def _is_drawn(one: Measure) -> bool:
    if one.kind == "low latency":
        return True
    return one.step in STEPS and one.kind in ("deep_moe", "gloo", "nccl")


def _curves(found: Sequence[Measure], axis: str) -> list[Curve]:
    points: dict[str, dict[int, Measure]] = {}
    for one in found:
        x = getattr(one, axis)
        if x is None:
            continue
        name = one.name.split(",")[0] if axis == "num_sms" else one.name
        driver = f" ({one.driver})" if one.driver else ""
        points.setdefault(f"{name}: {one.step}{driver}", {})[x] = one
    return [
        Curve(
            label,
            sorted(at),
            [at[x].us for x in sorted(at)],
            [at[x].share for x in sorted(at)],
        )
        for label, at in points.items()
        if len(at) > 1
    ]


def write_chart(path: Path, documents: Sequence[Document]) -> None:
    """Draws curves where there is anything to draw them over, else bars."""
    axis, found = curves(documents)
    rows = [Row(**row) for row in documents[0]["rows"]]
    title = describe_run(options_of(documents[0]))
    if found:
        if len(documents) > 1:  # each has its own number of tokens
            title = re.sub(r" \d+ tokens each( \(LL: \d+\))?,", "", title)
        write_curves(path, title, axis, found)
    elif drawn_rows(rows):
        write_bars(path, title, rows)
    else:
        raise ValueError("plot: there is nothing to draw in this run")


def write_curves(path: Path, title: str, axis: str, found: Sequence[Curve]) -> None:
    """Draws time and share of the bound, side by side."""
    pyplot = _pyplot()
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    has_shares = any(share is not None for curve in found for share in curve.shares)
    figure, panels = pyplot.subplots(
        1, 2 if has_shares else 1, figsize=(12, 7), layout="constrained", squeeze=False
    )
    times = panels[0, 0]
    for index, curve in enumerate(found):
        style = {"color": f"C{index % 10}", "marker": "os^Dv"[index // 10 % 5], "markersize": 4}
        style["linestyle"] = next((STYLES[driver] for driver in STYLES if driver in curve.label), "-")
        times.plot(curve.x, curve.us, label=curve.label, **style)
        both = zip(curve.x, curve.shares, strict=True)
        known = [(x, 100 * share) for x, share in both if share is not None]
        if known:
            panels[0, 1].plot(*zip(*known, strict=True), **style)
    places = sorted({x for curve in found for x in curve.x})
    for axes in panels[0]:
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [str(x) for x in places], fontsize=8)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(axis, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    times.set_yscale("log")
    times.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    times.yaxis.set_major_formatter(FuncFormatter(lambda us, _: f"{us:g}"))
    times.yaxis.set_minor_formatter(NullFormatter())
    times.set_ylabel("us (median, until the last rank is ready)", fontsize=8)
    if has_shares:
        panels[0, 1].axhline(100, color="black", linewidth=0.8)
        panels[0, 1].set_ylabel("% of the speed of a plain copy of the same bytes", fontsize=8)
        panels[0, 1].set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=3, fontsize=7)
    _finish(figure, path, title)


def write_bars(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draws the steps as bars, with the time of the plain copy of the same bytes as a mark on each."""
    pyplot = _pyplot()
    parts = [
        [row for row in drawn_rows(rows) if row.name.startswith("LL") == is_ll] for is_ll in (False, True)
    ]
    parts = [part[::-1] for part in parts if part]
    figure, panels = pyplot.subplots(
        len(parts),
        1,
        figsize=(10, 1.5 + 0.3 * sum(map(len, parts))),
        layout="constrained",
        squeeze=False,
        height_ratios=[len(part) for part in parts],
    )
    for axes, part in zip(panels[:, 0], parts, strict=True):
        _draw_bars(axes, part)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower right", fontsize=8)
    _finish(figure, path, title)


def _draw_bars(axes: Any, rows: Sequence[Row]) -> None:
    colours = {"deep_moe": "#2b6cb0", "gloo": "#dd8844", "nccl": "#dd8844", "layer": "#a0aec0"}
    places = range(len(rows))
    axes.barh(places, [row.us for row in rows], color=[colours[row.kind] for row in rows])
    for place, row in zip(places, rows, strict=True):
        axes.annotate(f" {row.us:,.0f}", (row.us, place), va="center", fontsize=8)
    marked = [
        (row.copy_us, place) for place, row in zip(places, rows, strict=True) if row.copy_us is not None
    ]
    if marked:
        times, heights = zip(*marked, strict=True)
        axes.scatter(
            times, heights, marker="|", s=160, color="black", zorder=3, label="plain copy of the same bytes"
        )
    axes.set_yticks(
        places, [" ".join(filter(None, (f"{row.name}: {row.step}", row.driver))) for row in rows], fontsize=8
    )
    axes.margins(x=0.1)
    axes.set_xlabel("us (median over the iterations, until the last rank is ready)", fontsize=8)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _finish(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)
    _pyplot().close(figure)
