"""Decodes tokens with low-latency calls: while one half of the batch is on its way, the other half computes.

    python examples/python/decode_loop.py                       # 2 ranks, processes of this machine
    torchrun --nproc-per-node 4 examples/python/decode_loop.py  # ranks that torchrun has started

Each step of a half is: attention, gate, dispatch, experts, combine. With ``return_recv_hook=True`` dispatch
and combine only send; their hooks receive. So half A's rows travel during half B's attention, and so on:

    A  attention  dispatch ............. hook  experts  combine ............. hook  attention  dispatch ...
    B                       attention  dispatch ................. hook  experts  combine ............. hook
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import deep_moe

HIDDEN, EXPERTS, TOPK, MAX_TOKENS = 256, 8, 2, 16


class Layer:
    """Weights that are the same on all ranks, and the experts of this one."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) / HIDDEN**0.5).to(device)

        self.mix, self.gate = normal(HIDDEN, HIDDEN), normal(HIDDEN, EXPERTS)
        self.experts = normal(EXPERTS, HIDDEN, HIDDEN)

    def attention(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Stands for attention: mixes a token with a memory of those before it; gives both."""
        memory = 0.5 * memory + 0.5 * x
        return torch.tanh(torch.nn.functional.rms_norm(memory, (HIDDEN,)) @ self.mix), memory

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and weights of the experts of each token."""
        weights, ids = (x @ self.gate).softmax(-1).topk(TOPK)
        return ids, weights


@dataclass
class Half:
    """One half of this rank's batch, and where it is in its step."""

    x: Tensor
    memory: Tensor
    ids: Tensor | None = None
    weights: Tensor | None = None
    received: tuple[Tensor, Tensor, tuple[Tensor, ...]] | None = None
    hook: Callable[[], None] | None = None

    def attend_and_send(self, layer: Layer, buffer: deep_moe.Buffer) -> None:
        """Attention and gate; then the rows set out."""
        self.x, self.memory = layer.attention(self.x, self.memory)
        self.ids, self.weights = layer.route(self.x)
        rows, count, handle, _, self.hook = buffer.low_latency_dispatch(
            self.x, self.ids, MAX_TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True
        )
        self.received = rows, count, handle

    def compute_and_return(self, layer: Layer, buffer: deep_moe.Buffer) -> None:
        """Receives rows, runs the experts on them, and the outputs set out."""
        self.hook()
        rows, count, handle = self.received
        first = buffer.rank * (EXPERTS // buffer.group_size)
        out = torch.empty_like(rows)
        for local, tokens in enumerate(count.tolist()):
            out[local, :tokens] = torch.relu(rows[local, :tokens] @ layer.experts[first + local])
        self.x, _, self.hook = buffer.low_latency_combine(
            out, self.ids, self.weights, handle, return_recv_hook=True
        )

    def receive(self) -> None:
        """The sums of the step are there afterwards."""
        self.hook()


def decode(layer: Layer, buffer: deep_moe.Buffer, tokens: Tensor, steps: int) -> Tensor:
    """Runs all steps on two halves in turns."""
    a, b = (Half(half.clone(), torch.zeros_like(half)) for half in tokens.tensor_split(2))
    a.attend_and_send(layer, buffer)
    for step in range(steps):
        b.attend_and_send(layer, buffer)  # A's rows travel
        a.compute_and_return(layer, buffer)  # B's rows travel
        b.compute_and_return(layer, buffer)  # A's sums travel
        a.receive()
        if step + 1 < steps:
            a.attend_and_send(layer, buffer)  # B's sums travel
        b.receive()
    return torch.cat([a.x, b.x])


def decode_alone(layer: Layer, tokens: Tensor, steps: int) -> Tensor:
    """The same with all experts here and nothing sent."""
    x, memory = tokens, torch.zeros_like(tokens)
    for _ in range(steps):
        x, memory = layer.attention(x, memory)
        ids, weights = layer.route(x)
        out = torch.relu(torch.einsum("th,tkhi->tki", x, layer.experts[ids]))
        x = (out * weights.unsqueeze(2)).sum(1)
    return x


def run_rank(rank: int, ranks: int, steps: int) -> None:
    """One rank: joins the others, decodes, and compares."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    size = deep_moe.Buffer.get_low_latency_rdma_size_hint(MAX_TOKENS, 2 * HIDDEN, ranks, EXPERTS)
    buffer = deep_moe.Buffer(dist.group.WORLD, num_rdma_bytes=size, low_latency_mode=True)
    layer = Layer(buffer.device)
    tokens = torch.randn(2 * (5 + rank), HIDDEN, generator=torch.Generator().manual_seed(rank)).to(
        buffer.device
    )
    found, expected = decode(layer, buffer, tokens, steps), decode_alone(layer, tokens, steps)
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    line = f"rank {rank}: {len(tokens)} tokens, {steps} steps, largest error {error:.1e}\n"
    sys.stdout.write(line)  # in one piece
    sys.stdout.flush()
    if not error < 1e-4:
        raise SystemExit("decode_loop.py: the result differs from that of one process")
    dist.barrier()
    buffer.destroy()
    dist.destroy_process_group()


def main() -> None:
    """Reads the command line and starts the ranks, unless torchrun has."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="a divisor of 8, the number of experts")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", given.ranks))
    if ranks < 1 or EXPERTS % ranks or given.steps < 1:
        parser.error(f"--ranks: got {ranks}; allowed are the divisors of {EXPERTS}; --steps: 1 or more")
    if "RANK" in os.environ:
        run_rank(int(os.environ["RANK"]), ranks, given.steps)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    torch.multiprocessing.start_processes(run_rank, (ranks, given.steps), ranks, start_method="spawn")


if __name__ == "__main__":
    main()
