"""The low-latency calls of a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deep_moe import reference

from .compare import one_rounding, same_bits, same_values, within
from .device import on_cpu, where
from .inputs import Inputs, random_rows, rng
from .program import Call, Expected, Here, packed

# What a 10-bit logarithmic code may be off by: a sign, and 9 bits for 32 octaves below a block's largest.
LOGFMT_RELATIVE_ERROR = 2 ** (32 / (2**9 - 2)) - 1
LOGFMT_SMALLEST = 2.0**-31  # of a block's largest; what is smaller may become zero


@dataclass(frozen=True)
class LowLatencyDispatch(Call):
    inputs: Inputs
    cap: int
    use_fp8: bool = False
    round_scale: bool = False
    use_ue8m0: bool = False
    hook: str = "none"  # "none": no hook; "now": called at once; "late": called when its rows are needed
    weights: bool = False  # give the weights to the dispatch
    buffer: int = 0

    def only(self, rank: int) -> LowLatencyDispatch:
        return replace(self, inputs=self.inputs.only(rank))

    def run(self, here: Here) -> Any:
        given, rank, buffer = self.inputs, here.rank, here.buffers[self.buffer]
        here.make_room()
        local = len(reference.experts_of(rank, here.num_ranks, given.experts))
        stats = where(buffer, torch.ones(local, dtype=torch.int32))
        costs = where(buffer, torch.zeros(here.num_ranks, dtype=torch.int64))
        result = buffer.low_latency_dispatch(
            given.x[rank],
            given.topk_idx[rank],
            self.cap,
            given.experts,
            cumulative_local_expert_recv_stats=stats,
            dispatch_wait_recv_cost_stats=costs,
            use_fp8=self.use_fp8,
            round_scale=self.round_scale,
            use_ue8m0=self.use_ue8m0,
            return_recv_hook=self.hook != "none",
            **({"topk_weights": given.topk_weights[rank]} if self.weights else {}),
        )
        hook = result[4]
        assert (hook is None) == (self.hook == "none"), f"hook is {hook}"
        if hook is not None:
            here.defer(hook)
            if self.hook == "now":
                here.settle(len(here.kept))
        return stats, costs, result

    def collect(self, here: Here, kept: Any) -> dict[str, Any]:
        stats, costs, (x, count, _, event, _) = kept
        parts = x if isinstance(x, tuple) else (x,)
        return {
            "x": [packed(on_cpu(part), on_cpu(count)) for part in parts],
            "shapes": [(part.dtype, tuple(part.shape)) for part in parts],
            "strides": [part.stride() for part in parts],
            "count": count,
            "stats": stats,
            "costs": costs,
            "event": event.event is None,
        }

    def check(self, results: Sequence[dict[str, Any]], expected: Expected, what: str) -> Any:
        received = reference.low_latency_dispatch(
            self.inputs.x,
            self.inputs.topk_idx,
            self.cap,
            self.inputs.experts,
            use_fp8=self.use_fp8,
            round_scale=self.round_scale,
            use_ue8m0=self.use_ue8m0,
        )
        for rank, (got, want) in enumerate(zip(results, received, strict=True)):
            at = f"{what}, rank {rank}"
            same_bits(got["count"], want.count, f"{at}, recv_count")
            same_bits(got["stats"], 1 + want.count, f"{at}, cumulative_local_expert_recv_stats")
            assert got["costs"].min() >= 0, f"{at}: negative waits {got['costs'].tolist()}"
            assert got["event"], f"{at}: the event of a synchronous call is not empty"
            parts = want.x if isinstance(want.x, tuple) else (want.x,)
            assert got["shapes"] == [(part.dtype, tuple(part.shape)) for part in parts], (
                f"{at}: {got['shapes']}"
            )
            for part, want_part in zip(got["x"], parts, strict=True):
                same_bits(part, packed(want_part, want.count), f"{at}, recv_x")
            if self.use_fp8:
                _, rows, columns = parts[1].shape
                strides = got["strides"][1]
                right = strides[1] == 1 and (columns == 1 or strides[2] == rows)
                assert right or parts[1].numel() == 0, f"{at}: scales with strides {strides}"
        return self


@dataclass(frozen=True)
class LowLatencyCombine(Call):
    """Random rows of every expert back to their owners."""

    of: int
    seed: int = 0
    hook: str = "none"
    logfmt: bool = False
    out: bool = False
    zero_copy: bool = False
    buffer: int = 0

    def rows(self, rank: int, count: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The experts' rows in their blocks; NaN wherever there is none."""
        blocks = torch.full(tuple(shape), float("nan"), dtype=dtype)
        used = torch.arange(shape[1]).unsqueeze(0) < count.unsqueeze(1)
        blocks[used] = random_rows(rng(self.seed, 8, rank), int(count.sum()), shape[2], dtype)
        return blocks

    def run(self, here: Here) -> Any:
        buffer, dispatch = here.buffers[self.buffer], here.calls[self.of]
        assert isinstance(dispatch, LowLatencyDispatch)
        given = dispatch.inputs
        here.settle(self.of)
        here.make_room()
        x, count, handle, _, _ = here.kept[self.of][2]
        data = x if isinstance(x, Tensor) else x[0]
        y = self.rows(here.rank, on_cpu(count), (*data.shape[:2], given.hidden), given.dtype)
        y = where(buffer, y)
        if self.zero_copy:
            y = buffer.get_next_low_latency_combine_buffer(handle).copy_(y)
        idx, weights = given.topk_idx[here.rank], given.topk_weights[here.rank]
        out = None
        if self.out:
            out = where(buffer, torch.full((len(idx), given.hidden), float("nan"), dtype=given.dtype))
        result = buffer.low_latency_combine(
            y,
            idx,
            weights,
            handle,
            use_logfmt=self.logfmt,
            zero_copy=self.zero_copy,
            return_recv_hook=self.hook != "none",
            out=out,
        )
        hook = result[2]
        assert (hook is None) == (self.hook == "none"), f"hook is {hook}"
        if hook is not None:
            here.defer(hook)
            if self.hook == "now":
                here.settle(len(here.kept))
        return y, out, result

    def collect(self, here: Here, kept: Any) -> dict[str, Any]:
        _, out, (combined, event, _) = kept
        into_out = out is None or combined.data_ptr() == out.data_ptr()
        return {"x": combined, "event": event.event is None, "out": into_out}

    def check(self, results: Sequence[dict[str, Any]], expected: Expected, what: str) -> None:
        dispatch: LowLatencyDispatch = expected[self.of]
        given = dispatch.inputs
        counts = reference.low_latency_slots(given.topk_idx, given.experts)[1]
        experts = [reference.experts_of(rank, given.ranks, given.experts) for rank in range(given.ranks)]
        slots = max(1, int(counts.max())) if len(counts) else 1  # rows of a block that hold anything
        y = [
            self.rows(rank, counts[mine.start : mine.stop], (len(mine), slots, given.hidden), given.dtype)
            for rank, mine in enumerate(experts)
        ]
        pre_reduced = dispatch.weights or self.hook == "none"
        sums = reference.low_latency_combine(
            y, given.topk_idx, given.topk_weights, given.experts, pre_reduced=pre_reduced
        )
        for rank, (got, want) in enumerate(zip(results, sums, strict=True)):
            at = f"{what}, rank {rank}"
            assert got["event"], f"{at}: the event of a synchronous call is not empty"
            assert got["out"], f"{at}: the result is not in the tensor given as out"
            if not self.logfmt:
                same_values(got["x"], want, f"{at}, combined_x")
        if self.logfmt:
            near_sums([got["x"] for got in results], sums, y, given, f"{what}, combined_x")


def near_sums(
    results: Sequence[Tensor], sums: Sequence[Tensor], y: Sequence[Tensor], given: Inputs, what: str
) -> None:
    """Sums of rows that have travelled as logarithms are as close as the codes allow."""
    # The sum of weight times magnitude behind each element: what relative errors refer to.
    magnitudes = reference.low_latency_combine(
        [rows.float().abs() for rows in y],
        given.topk_idx,
        [one.abs() for one in given.topk_weights],
        given.experts,
        pre_reduced=False,
    )
    for rank, (got, want, magnitude) in enumerate(zip(results, sums, magnitudes, strict=True)):
        allowed = LOGFMT_RELATIVE_ERROR * magnitude + 3 * one_rounding(want.dtype, magnitude)
        allowed += LOGFMT_SMALLEST * magnitude.amax(1, keepdim=True)
        within(got, want, allowed, f"{what}, rank {rank}")
