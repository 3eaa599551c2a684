"""What one rank routes: its rows, their experts and weights, made from the options alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .gate import Routes, gate_weight, load_trace, made_up_routes, run_gate, trace_routes
from .options import DTYPE_NAMES, BenchOptions
from .text import embed, load_tokens, window


@dataclass
class Inputs:
    """``x [T, H]`` in the run's type, ``topk_idx [T, K] int64``, ``topk_weights [T, K] float32``.

    ``gate`` is the gate's matrix ``[H, E] float32``, or None where the routes do not come from a gate.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    gate: torch.Tensor | None

    def head(self, num_tokens: int) -> Inputs:
        """Returns the first ``num_tokens`` rows, each tensor contiguous."""
        return Inputs(
            self.x[:num_tokens], self.topk_idx[:num_tokens], self.topk_weights[:num_tokens], self.gate
        )


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch type of ``bf16``, ``fp16`` or ``fp32``."""
    dtype = getattr(torch, DTYPE_NAMES[name])
    assert isinstance(dtype, torch.dtype)
    return dtype


def make_inputs(options: BenchOptions, rank: int, device: torch.device) -> Inputs:
    """Makes a rank's inputs: rows ``[rank * T, (rank + 1) * T)`` of text or trace, or drawn ones."""
    dtype = torch_dtype(options.dtype)
    gate: torch.Tensor | None = None
    if options.routing == "text":
        tokens = window(load_tokens(options.text or None), rank * options.tokens, options.tokens)
        x = embed(tokens, options.hidden).to(dtype)
        gate = gate_weight(options.hidden, options.experts, options.seed)
        routes = gate_routes(options, x, gate)
        gate = gate.to(device)
    else:
        seed = options.seed * 1_000_003 + rank
        generator = torch.Generator().manual_seed(seed + 500_000)
        x = torch.randn(options.tokens, options.hidden, generator=generator).to(dtype)
        if options.routing == "trace":
            trace = load_trace(options.trace)
            if int(trace.max()) >= options.experts:
                raise ValueError(
                    f"experts: got {options.experts}, but the trace holds the id {int(trace.max())}; "
                    f"allowed: {int(trace.max()) + 1} or more"
                )
            routes = trace_routes(trace, rank * options.tokens, options.tokens, seed)
        else:
            routes = made_up_routes(options.routing, options.tokens, options.experts, options.topk, seed)
    return Inputs(x.to(device), routes[0].to(device), routes[1].to(device), gate)


def gate_routes(options: BenchOptions, x: torch.Tensor, gate: torch.Tensor) -> Routes:
    """Runs the options' gate over ``x``."""
    return run_gate(x, gate, options.gate, options.topk, options.groups, options.topk_groups)
