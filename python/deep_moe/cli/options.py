"""What a bench run does: one plain, frozen set of numbers that travels to the rank processes as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from .models import ModelShape

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "gate": ("softmax", "sigmoid"),
    "dtype": tuple(DTYPE_BYTES),
    "mode": ("ht", "ll", "both"),
    "routing": ("text", "uniform", "zipf", "hot", "trace"),
    "compare": ("none", "gloo", "nccl"),
}
FP8_BLOCK = 128
LL_TOKENS = 128
# A layer of DeepSeek-V3 in training; the GPUs' own defaults.
GPU_DEFAULTS: dict[str, Any] = {
    "tokens": 4096,
    "hidden": 7168,
    "experts": 256,
    "mode": "ht",
    "iters": 10,
    "warmup": 1,
}
GPU_PARTS = ("graph", "overlap", "host_cost", "expert_major")


@dataclass(frozen=True)
class BenchOptions:
    """All parameters of a run.

    ``processes``: those that the ranks run in, one a rank or one for all; ``ll_tokens``: tokens a rank in LL
    mode; ``ffn``: the experts' inner width.
    """

    ranks: int = 4
    processes: int = 4
    device: str = "cpu"
    tokens: int = 512
    hidden: int = 2048
    experts: int = 64
    topk: int = 8
    groups: int = 0
    topk_groups: int = 0
    gate: str = "softmax"
    dtype: str = "bf16"
    fp8: bool = False
    mode: str = "both"
    model: str = ""
    routing: str = "text"
    text: str = ""
    trace: str = ""
    compare: str = "none"
    num_sms: tuple[int, ...] = ()
    graph: bool = False
    overlap: bool = False
    host_cost: bool = False
    expert_major: bool = False
    iters: int = 20
    warmup: int = 3
    check: bool = True
    ll_tokens: int = 0
    ffn: int = 16
    seed: int = 0
    timeout: float = 600.0

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes to run, in order."""
        return ("ht", "ll") if self.mode == "both" else (self.mode,)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of x."""
        return self.hidden * DTYPE_BYTES[self.dtype]

    @property
    def can_fp8(self) -> bool:
        """Whether rows can be cut into the blocks of 128 that share an fp8 scale."""
        return self.hidden % FP8_BLOCK == 0

    def to_json(self) -> str:
        """Returns all fields as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> BenchOptions:
        """Returns what :meth:`to_json` wrote."""
        fields = json.loads(text)
        return BenchOptions(**fields | {"num_sms": tuple(fields["num_sms"])})


def parse_numbers(text: str, name: str) -> tuple[int, ...]:
    """Returns the numbers of ``"8"`` or ``"8,12,16"``; ValueError that names the option for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name}: got {text}; allowed: a number, or several with commas between") from None


def resolve(given: dict[str, Any], model: ModelShape | None = None, trace_topk: int = 0) -> BenchOptions:
    """Merges defaults, ``model`` and the ``given`` options that are not None, in this order; validates."""
    options = BenchOptions()
    if given.get("device") == "cuda":
        options = replace(options, **GPU_DEFAULTS)
    if model is not None:
        options = replace(
            options,
            model=model.name,
            hidden=model.hidden,
            experts=model.num_experts,
            topk=model.topk,
            groups=model.groups,
            topk_groups=model.topk_groups,
        )
    chosen = {key: value for key, value in given.items() if value is not None and key != "model"}
    if trace_topk:
        if chosen.setdefault("topk", trace_topk) != trace_topk:
            raise ValueError(
                f"topk: got {chosen['topk']}, but the trace has {trace_topk} ids a row; leave topk out"
            )
        chosen["routing"] = "trace"
    options = replace(options, **chosen)
    if "processes" not in chosen:
        options = replace(options, processes=options.ranks)
    if options.ll_tokens == 0:
        options = replace(options, ll_tokens=min(options.tokens, LL_TOKENS))
    validate(options)
    return options


def validate(options: BenchOptions) -> None:
    """Raises ValueError for the first option that is out of its range; the text says what is allowed."""
    for key, allowed in CHOICES.items():
        if getattr(options, key) not in allowed:
            raise ValueError(f"{key}: got {getattr(options, key)!r}; allowed are {', '.join(allowed)}")
    for key in ("ranks", "tokens", "hidden", "experts", "topk", "iters", "ll_tokens", "ffn"):
        _require(getattr(options, key) >= 1, key, getattr(options, key), "1 or more")
    for key in ("groups", "topk_groups", "warmup"):
        _require(getattr(options, key) >= 0, key, getattr(options, key), "0 or more")
    _require(options.timeout > 0, "timeout", options.timeout, "seconds above 0")
    for number in options.num_sms:
        _require(number >= 1, "num-sms", number, "1 or more")
    _validate_device(options)
    _require(
        options.row_bytes % 16 == 0,
        "hidden",
        options.hidden,
        f"a multiple of {16 // DTYPE_BYTES[options.dtype]} in {options.dtype} (rows of 16-byte pieces)",
    )
    if options.compare == "gloo" and "ht" not in options.modes:
        raise ValueError("compare: gloo is compared with the HT mode; leave out --mode ll")
    _require(
        options.ll_tokens <= options.tokens,
        "ll-tokens",
        options.ll_tokens,
        f"at most tokens = {options.tokens}",
    )
    if options.routing != "trace":
        _require(
            options.topk <= options.experts, "topk", options.topk, f"at most experts = {options.experts}"
        )
    if options.fp8:
        _require(options.can_fp8, "hidden", options.hidden, f"a multiple of {FP8_BLOCK} with --fp8")
    if options.groups:
        _require(
            options.experts % options.groups == 0, "groups", options.groups, f"a divisor of {options.experts}"
        )
        _require(
            1 <= options.topk_groups <= options.groups,
            "topk-groups",
            options.topk_groups,
            f"1 to {options.groups}",
        )
        room = options.topk_groups * (options.experts // options.groups)
        _require(
            options.topk <= room, "topk", options.topk, f"at most {room}, the experts of the chosen groups"
        )
    elif options.topk_groups:
        raise ValueError("topk-groups: it needs --groups; give both or neither")


def _validate_device(options: BenchOptions) -> None:
    if options.device == "cuda":
        if options.compare == "gloo":
            raise ValueError("compare: gloo is for the CPU; on GPUs: nccl")
        if options.compare == "nccl" and "ht" not in options.modes:
            raise ValueError("compare: nccl is compared with the HT mode; leave out --mode ll")
        return
    if options.compare == "nccl":
        raise ValueError("compare: nccl needs several GPUs; on the CPU: gloo")
    for part in GPU_PARTS:
        if getattr(options, part):
            raise ValueError(f"{part.replace('_', '-')}: it needs GPUs (--device cuda)")


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name}: got {value}; allowed: {allowed}")
