"""Low latency on GPUs: pairs of few tokens in graphs and from Python, and a GEMM between send and hook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..buffer import Buffer
from ..events import cuda
from .chains import Check
from .exchange_jobs import through_fp8
from .experts import ExpertBank, local_experts, relative_error, uncast_fp8
from .gpu_calls import Timed
from .gpu_extras import GEMM, GEMM_SAMPLES
from .gpu_world import World
from .inputs import Inputs
from .jobs import TOLERANCE
from .options import BenchOptions

COUNTS = (1, 8, 32, 128)  # tokens a rank
GRAPH_PAIRS = 20  # pairs in one CUDA graph
REPLAYS = 10
EAGER_PAIRS = 200
CHECKED_TOKENS = 32
HEAP_TENSORS = 5  # packed tensors of the run's type that are alive at a time


@dataclass(frozen=True)
class Way:
    """How the calls of a pair are made."""

    name: str
    weights: bool = False  # given to the dispatch
    hook: bool = False


WAYS = (
    Way("pair, weights at dispatch", weights=True),
    Way("pair, V1 calls"),
    Way("pair by hooks, weights at dispatch", weights=True, hook=True),
    Way("pair by hooks, V1 calls", hook=True),
)


def token_counts(options: BenchOptions) -> list[int]:
    """The numbers of tokens that are timed: those of ``COUNTS``, up to the run's."""
    return sorted({min(count, options.ll_tokens) for count in COUNTS} | {options.ll_tokens})


class LowLatencyJobs:
    """All that a run measures of the low-latency calls, on one rank."""

    def __init__(self, world: World, options: BenchOptions, inputs: Inputs) -> None:
        self._world, self._options, self._inputs = world, options, inputs.head(options.ll_tokens)
        self._mine = local_experts(world.rank, options.ranks, options.experts)
        packed = len(self._mine) * options.ranks * options.ll_tokens * options.row_bytes
        hint = Buffer.get_low_latency_rdma_size_hint(
            options.ll_tokens, options.hidden, options.ranks, options.experts
        )
        self.buffer = Buffer(
            None,
            HEAP_TENSORS * packed,
            hint,
            low_latency_mode=True,
            comm=world.comm,
            device=world.device,
            explicitly_destroy=True,
            timeout=min(20.0, options.timeout),
        )
        handle = self._dispatch(self._inputs, fp8=True, way=WAYS[1])[2]
        self._y = self.buffer.get_next_low_latency_combine_buffer(handle).zero_()
        world.at_rest()

    def _dispatch(self, inputs: Inputs, fp8: bool, way: Way, cap: int = 0) -> Any:
        options: dict[str, Any] = {"topk_weights": inputs.topk_weights} if way.weights else {}
        return self.buffer.low_latency_dispatch(
            inputs.x,
            inputs.topk_idx,
            cap or self._options.ll_tokens,
            self._options.experts,
            use_fp8=fp8,
            return_recv_hook=way.hook,
            **options,
        )

    def _combine(self, inputs: Inputs, y: torch.Tensor, handle: Any, way: Way) -> Any:
        return self.buffer.low_latency_combine(
            y, inputs.topk_idx, inputs.topk_weights, handle, return_recv_hook=way.hook
        )

    def _pair(self, inputs: Inputs, fp8: bool, way: Way) -> Callable[[], None]:
        def pair() -> None:
            low = self._dispatch(inputs, fp8, way)
            if way.hook:
                low[4]()
            back = self._combine(inputs, self._y, low[2], way)
            if way.hook:
                back[2]()

        return pair

    def check(self) -> list[Check]:
        """Runs whole layers over some of the tokens and compares them with a dense computation."""
        world, options = self._world, self._options
        bank = ExpertBank(self._mine, options.hidden, options.ffn, options.seed, world.device)
        some = self._inputs.head(min(len(self._inputs.x), CHECKED_TOKENS))
        checks = []
        for payload in self._payloads():
            is_fp8 = payload == "fp8"
            seen = replace(some, x=through_fp8(some.x)) if is_fp8 else some
            dense = bank.dense(seen.x, seen.topk_idx, seen.topk_weights, options.experts)
            for way in WAYS:
                world.at_rest()
                low = self._dispatch(some, is_fp8, way, CHECKED_TOKENS)
                if way.hook:
                    low[4]()
                world.at_rest()
                rows = uncast_fp8(*low[0]).to(some.x.dtype) if is_fp8 else low[0]
                y = bank.packed_rows(rows, low[1].tolist(), torch.zeros_like(rows))
                world.at_rest()
                back = self._combine(some, y, low[2], way)
                if way.hook:
                    back[2]()
                world.at_rest()
                error = relative_error(back[0], dense)
                checks.append(Check(f"LL {payload}, {way.name}", error, TOLERANCE[options.dtype]))
        return checks

    def _payloads(self) -> tuple[str, ...]:
        return ("fp8", self._options.dtype) if self._options.can_fp8 else (self._options.dtype,)

    def time_all(self) -> list[dict[str, Any]]:
        """Collective: an entry for each payload, number of tokens, way and driver."""
        entries = []
        for payload in self._payloads():
            for tokens in token_counts(self._options):
                inputs = self._inputs.head(tokens)
                for way in WAYS:
                    pair = self._pair(inputs, payload == "fp8", way)
                    about = {"call": way.name, "payload": payload, "tokens": tokens}
                    self._world.phase(f"time low latency, {tokens} tokens, {payload}, {way.name}")
                    entries.append(about | {"driver": "graph"} | self._in_graphs(pair))
                    entries.append(about | {"driver": "Python"} | self._eager(pair))
        return entries

    def _samples(self, timed: Timed, count: int, pairs: int) -> dict[str, list[float]]:
        keys = ("device_us", "issue_us", "wall_us")
        samples: dict[str, list[float]] = {key: [] for key in keys}
        for sample in range(self._options.warmup + self._options.iters):
            self._world.at_rest()
            times = timed.run(count)
            if sample >= self._options.warmup:
                for key, value in zip(keys, times, strict=True):
                    samples[key].append(value / pairs)
        self._world.at_rest()
        return samples

    def _eager(self, pair: Callable[[], None]) -> dict[str, list[float]]:
        return self._samples(Chain(pair), EAGER_PAIRS, 1)

    def _in_graphs(self, pair: Callable[[], None]) -> dict[str, list[float]]:
        """Ranks capture in turn: torch waits for the device before it begins."""
        graph = torch.cuda.CUDAGraph()
        pair()
        for turn in range(self._options.ranks):
            self._world.at_rest()
            if turn != self._world.rank:
                continue
            stream = torch.cuda.current_stream()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for _ in range(GRAPH_PAIRS):
                    pair()
        samples = self._samples(Chain(graph.replay), REPLAYS, GRAPH_PAIRS)
        del graph
        return samples

    def overlap(self) -> list[dict[str, Any]]:
        """Collective: the time of a GEMM alone, and between the send half of a call and its hook."""
        world = self._world
        way, rows, columns, inner = WAYS[2], *GEMM
        a = torch.randn(rows, inner, device=world.device, dtype=torch.bfloat16)
        b = torch.randn(inner, columns, device=world.device, dtype=torch.bfloat16)
        out = torch.matmul(a, b)
        low = self._dispatch(self._inputs, False, replace(way, hook=False))
        calls: dict[str, Callable[[], Callable[[], None]]] = {
            "alone": lambda: lambda: None,
            "dispatch": lambda: self._dispatch(self._inputs, False, way)[4],
            "combine": lambda: self._combine(self._inputs, self._y, low[2], way)[2],
        }
        samples: dict[str, list[float]] = {call: [] for call in calls}
        world.phase("time a GEMM between send and hook")
        for sample in range(GEMM_SAMPLES + 1):
            for call, send in calls.items():
                begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
                world.at_rest()
                hook = send()
                begin.record()
                if world.rank == 0:
                    torch.matmul(a, b, out=out)
                end.record()
                hook()
                torch.cuda.current_stream().synchronize()
                if sample > 0:
                    samples[call].append(1e3 * begin.elapsed_time(end))
        world.at_rest()
        return [{"gemm": GEMM, "tokens": len(self._inputs.x), "us": samples}] if world.rank == 0 else []


class Chain(Timed):
    """A function as what is timed."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__()
        self._chain = function


def run_low_latency(world: World, options: BenchOptions, inputs: Inputs) -> dict[str, Any]:
    """Collective: what a run with LL calls reports beside its high-throughput part."""
    world.phase("open the buffer for low latency")
    jobs = LowLatencyJobs(world, options, inputs)
    checks: list[Check] = []
    if options.check:
        world.phase("check whole layers at low latency")
        checks = jobs.check()
    entries = jobs.time_all()
    overlap = jobs.overlap() if options.overlap else []
    world.at_rest()
    jobs.buffer.destroy()
    return {
        "low_latency": entries,
        "hook_overlap": overlap,
        "checks": [check.to_dict() for check in checks],
    }
