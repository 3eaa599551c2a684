"""Trains a small language model with a Mixture-of-Experts layer, its experts spread over ranks.

    python examples/python/train_moe.py                       # 4 ranks, processes of this machine
    torchrun --nproc-per-node 4 examples/python/train_moe.py  # ranks that torchrun has started
    python examples/python/train_moe.py --check               # and compare with one process

Every rank reads other words of a text and owns some of the experts. The layer sends each word's row to the
experts that its gate has chosen (deep_moe.nn.dispatch), and sums what they return (combine); both run
backwards by autograd. What all ranks hold (embedding, gate, head) gets the sum of the ranks' gradients; the
experts' come with the rows.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

# An optimizer imports this, and its functions keep the default group of that time. Imported before there is
# one, the group ends with destroy_process_group(); else it lives on, and gloo may abort as Python ends.
import torch.distributed.nn.functional
from torch import Tensor, nn

import deep_moe
import deep_moe.nn as moe


@dataclass(frozen=True)
class Options:
    """Sizes; tokens are those of all ranks together."""

    tokens: int = 512
    steps: int = 30
    words: int = 64
    hidden: int = 32
    inner: int = 64
    experts: int = 8
    topk: int = 2
    rate: float = 0.5


class Experts(nn.Module):
    """Two-layer experts, the global ones from ``first`` on."""

    def __init__(self, options: Options, first: int, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(count, options.hidden, options.inner))
        self.down = nn.Parameter(torch.empty(count, options.inner, options.hidden))
        for i in range(count):  # an expert starts the same wherever it lives
            generator = torch.Generator().manual_seed(1000 + first + i)
            nn.init.normal_(self.up[i], std=options.hidden**-0.5, generator=generator)
            nn.init.normal_(self.down[i], std=options.inner**-0.5, generator=generator)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Rows ``[N, H]``; ids ``[N, K]`` of these experts, or -1; weights ``[N, K]``. Weighted sums."""
        out = torch.zeros_like(x)
        for i in range(len(self.up)):
            row, k = (ids == i).nonzero(as_tuple=True)
            made = nn.functional.gelu(x[row] @ self.up[i]) @ self.down[i]
            out = out.index_add(0, row, made * weights[row, k].unsqueeze(1))
        return out


class MoELayer(nn.Module):
    """Experts behind a gate. Without a Buffer this process owns all of them and nothing is sent."""

    def __init__(self, options: Options, buffer: deep_moe.Buffer | None) -> None:
        super().__init__()
        rank, ranks = (buffer.rank, buffer.group_size) if buffer is not None else (0, 1)
        each = options.experts // ranks
        self.buffer, self.options = buffer, options
        self.gate = nn.Linear(options.hidden, options.experts, bias=False)
        self.experts = Experts(options, rank * each, each)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(self.options.topk)
        if self.buffer is None:
            return self.experts(x, ids, weights)
        sent = moe.dispatch(self.buffer, x, ids, weights, num_experts=self.options.experts)
        out = self.experts(sent.x, sent.topk_idx, sent.topk_weights)
        return moe.combine(self.buffer, out, sent.handle).x


class Model(nn.Module):
    """Guesses the next word from the present one and the one before."""

    def __init__(self, options: Options, buffer: deep_moe.Buffer | None) -> None:
        super().__init__()
        torch.manual_seed(0)  # what all ranks hold starts the same on all of them
        self.embed = nn.Embedding(2 * options.words, options.hidden)
        self.layer = MoELayer(options, buffer)
        self.head = nn.Linear(options.hidden, options.words)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words).sum(1)
        return self.head(x + self.layer(x))


def read_words(options: Options) -> Tensor:
    """``[tokens + 2]`` word numbers of the text that comes with deep_moe; rare ones share the last number."""
    text = (Path(deep_moe.__file__).parent / "data" / "prose.txt").read_text(encoding="utf-8")
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    common = sorted(set(words), key=lambda word: (-words.count(word), word))[: options.words - 1]
    number = {word: i for i, word in enumerate(common)}
    wanted = options.tokens + 2
    return torch.tensor([number.get(words[i % len(words)], options.words - 1) for i in range(wanted)])


def train(options: Options, rank: int, ranks: int, buffer: deep_moe.Buffer | None) -> list[float]:
    """Trains on this rank's part of the text; the losses are means over the tokens of all ranks."""
    device = buffer.device if buffer is not None else torch.device("cpu")
    text = read_words(options)
    pairs = torch.stack([text[:-2], text[1:-1] + options.words], 1)
    share = slice(rank * options.tokens // ranks, (rank + 1) * options.tokens // ranks)
    inputs, wanted = pairs[share].to(device), text[2:][share].to(device)
    model = Model(options, buffer).to(device)
    held_by_all = [p for name, p in model.named_parameters() if ".experts." not in name]
    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate, momentum=0.9)
    losses = []
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), wanted, reduction="sum") / options.tokens
        loss.backward()
        total = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(total)
            for parameter in held_by_all:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(total.item())
    return losses


def run_rank(rank: int, ranks: int, options: Options, check: bool) -> None:
    """One rank: joins the others, trains, and on rank 0 prints the losses."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    buffer = deep_moe.Buffer(dist.group.WORLD)
    losses = train(options, rank, ranks, buffer)
    if rank == 0:
        dense = train(options, 0, 1, None) if check else losses
        for step, (loss, reference) in enumerate(zip(losses, dense, strict=True)):
            if step % 5 == 0 or step == options.steps - 1:
                print(f"step {step:3d}  loss {loss:.5f}" + (f"  dense {reference:.5f}" if check else ""))
        worst = max(abs(a - b) / b for a, b in zip(losses, dense, strict=True))
        if check:
            print(f"largest difference from the dense run: {worst:.1e} of the loss")
        if worst > 1e-3 or losses[-1] > 0.7 * losses[0]:
            raise SystemExit("train_moe.py: the loss differs from the dense run's, or does not fall")
    dist.barrier()
    buffer.destroy()
    dist.destroy_process_group()


def main() -> None:
    """Reads the command line and starts the ranks, unless torchrun has."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="a divisor of 8, the number of experts")
    parser.add_argument("--steps", type=int, default=Options.steps)
    parser.add_argument("--check", action="store_true", help="compare with one process that holds everything")
    given = parser.parse_args()
    options = Options(steps=given.steps)
    ranks = int(os.environ.get("WORLD_SIZE", given.ranks))
    if ranks < 1 or options.experts % ranks:
        parser.error(f"--ranks: got {ranks}; allowed are the divisors of {options.experts}")
    if "RANK" in os.environ:
        run_rank(int(os.environ["RANK"]), ranks, options, given.check)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    torch.multiprocessing.start_processes(
        run_rank, (ranks, options, given.check), ranks, start_method="spawn"
    )


if __name__ == "__main__":
    main()
