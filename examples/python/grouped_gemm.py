"""An MoE layer whose experts are two grouped GEMMs over expert-major rows.

    python examples/python/grouped_gemm.py                       # 2 ranks, processes of this machine
    torchrun --nproc-per-node 4 examples/python/grouped_gemm.py  # ranks that torchrun has started

``dispatch(..., expert_major=True)`` gives rows grouped by local expert, each group padded with zero rows to a
multiple of ``expert_alignment``, and where the groups begin, on the device. That is what grouped GEMMs take:
``torch.nn.functional.grouped_mm`` where torch has it, here else a loop over the groups. ``combine`` applies
the top-k weights as it sums.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys

import torch
import torch.distributed as dist
from torch import Tensor

import deep_moe

HIDDEN, INNER, EXPERTS, TOPK, ALIGNMENT = 256, 512, 8, 2, 16


def grouped_mm(rows: Tensor, weights: Tensor, offsets: Tensor, sizes: list[int]) -> Tensor:
    """Each group of ``rows [P, A]`` times the matrix of its expert, ``weights [L, A, B]``: ``[P, B]``."""
    library = getattr(torch.nn.functional, "grouped_mm", None)
    if library is not None and (not rows.is_cuda or torch.cuda.get_device_capability() >= (9, 0)):
        out: Tensor = library(rows, weights, offs=offsets[1:])
        return out
    groups = rows.split(sizes)
    return torch.cat([group @ matrix for group, matrix in zip(groups, weights, strict=True)])


class Layer:
    """A gate and experts that are the same on all ranks; a rank uses its block of the experts."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            values = torch.randn(*shape, generator=generator) / shape[-2] ** 0.5
            return values.to(device, torch.bfloat16)

        self.gate = normal(HIDDEN, EXPERTS)
        self.up, self.down = normal(EXPERTS, HIDDEN, INNER), normal(EXPERTS, INNER, HIDDEN)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and weights of the experts of each token."""
        weights, ids = (x @ self.gate).float().softmax(-1).topk(TOPK)
        return ids, weights

    def forward(self, buffer: deep_moe.Buffer, x: Tensor) -> Tensor:
        """The layer on this rank's tokens ``[T, HIDDEN]``."""
        ids, weights = self.route(x)
        rows, _, row_weights, sizes, handle, _ = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_experts=EXPERTS,
            expert_alignment=ALIGNMENT,
            expert_major=True,
        )
        local = EXPERTS // buffer.group_size
        mine = slice(buffer.rank * local, (buffer.rank + 1) * local)
        inner = torch.relu(grouped_mm(rows, self.up[mine], handle.expert_offsets, sizes))
        out = grouped_mm(inner, self.down[mine], handle.expert_offsets, sizes)
        return buffer.combine(out, handle, row_weights=row_weights)[0]

    def forward_alone(self, x: Tensor) -> Tensor:
        """The same with all experts here, every token through every expert."""
        ids, weights = self.route(x)
        inner = torch.relu(torch.einsum("th,ehi->tei", x, self.up))
        out = torch.einsum("tei,eih->teh", inner, self.down).float()
        return (out.gather(1, ids[:, :, None].expand(-1, -1, HIDDEN)) * weights[:, :, None]).sum(1)


def run_rank(rank: int, ranks: int, tokens: int) -> None:
    """One rank: joins the others, runs the layer, and compares."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    buffer = deep_moe.Buffer(dist.group.WORLD)
    layer = Layer(buffer.device)
    x = torch.randn(tokens + rank, HIDDEN, generator=torch.Generator().manual_seed(rank))
    x = x.to(buffer.device, torch.bfloat16)
    found, expected = layer.forward(buffer, x).float(), layer.forward_alone(x)
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    sys.stdout.write(f"rank {rank}: {len(x)} tokens, largest error {error:.1e}\n")  # in one piece
    sys.stdout.flush()
    if not error < 0.02:
        raise SystemExit("grouped_gemm.py: the result differs from that of one process")
    dist.barrier()
    buffer.destroy()
    dist.destroy_process_group()


def main() -> None:
    """Reads the command line and starts the ranks, unless torchrun has."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="a divisor of 8, the number of experts")
    parser.add_argument("--tokens", type=int, default=100, help="of rank 0; each next rank has one more")
    given = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", given.ranks))
    if ranks < 1 or EXPERTS % ranks or given.tokens < 0:
        parser.error(f"--ranks: got {ranks}; allowed are the divisors of {EXPERTS}; --tokens: 0 or more")
    if "RANK" in os.environ:
        run_rank(int(os.environ["RANK"]), ranks, given.tokens)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    torch.multiprocessing.start_processes(run_rank, (ranks, given.tokens), ranks, start_method="spawn")


if __name__ == "__main__":
    main()
