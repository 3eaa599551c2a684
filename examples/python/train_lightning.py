"""Trains train_moe.py's model with PyTorch Lightning: DDP for what all ranks hold, experts spread over ranks.

    python examples/python/train_lightning.py                       # 2 ranks that Lightning starts
    torchrun --nproc-per-node 4 examples/python/train_lightning.py  # ranks that torchrun has started
    python examples/python/train_lightning.py --check               # and compare with one process

Needs ``deep-moe[lightning]``. Ranks are on GPUs where there are enough, else on the CPU. Three things are not
as in any other LightningModule:

1. The Buffer is made in ``configure_model``, when the ranks know each other, and the layer behind it.
2. DDP leaves the experts alone: each rank has others. Their gradients come with the rows.
3. These are sums over all ranks' losses, where DDP takes the mean: so they are divided by the ranks.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: see train_moe.py
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from train_moe import Model, Options, read_words, train

import deep_moe


class LanguageModel(lightning.LightningModule):
    """The model of train_moe.py, made when the ranks know each other."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.model: Model | None = None
        self.buffer: deep_moe.Buffer | None = None

    def configure_model(self) -> None:
        """Makes the Buffer and the layers, before DDP looks at the parameters."""
        if self.model is not None:
            return
        ranks = self.trainer.world_size
        if ranks > 1:
            self.buffer = deep_moe.Buffer(dist.group.WORLD, device=self.trainer.strategy.root_device)
        self.model = Model(self.options, self.buffer)
        experts = {name: p for name, p in self.named_parameters() if ".experts." in name}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, list(experts))
        for parameter in experts.values():
            parameter.register_hook(lambda gradient: gradient / ranks)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The mean loss of this rank's tokens."""
        assert self.model is not None
        words, wanted = batch
        loss = nn.functional.cross_entropy(self.model(words), wanted)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One for all parameters of this rank: what DDP reduces is the same everywhere, and stays so."""
        return torch.optim.SGD(self.parameters(), lr=self.options.rate, momentum=0.9)

    def teardown(self, stage: str) -> None:
        """The Buffer goes when no rank needs another any more."""
        if self.buffer is not None:
            self.trainer.strategy.barrier()
            self.buffer.destroy()


class Losses(lightning.Callback):
    """Keeps the loss of each step, the mean of all ranks."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        """``sync_dist`` has taken the mean."""
        self.found.append(float(trainer.callback_metrics["loss"]))


def loader(options: Options, ranks: int) -> DataLoader[Any]:
    """All of the text in one step; Lightning gives each rank its share by a DistributedSampler."""
    text = read_words(options)
    pairs = torch.stack([text[:-2], text[1:-1] + options.words], 1)
    return DataLoader(TensorDataset(pairs, text[2:]), batch_size=options.tokens // ranks)


def run(options: Options, ranks: int, nodes: int, check: bool) -> None:
    """Trains, and on rank 0 prints the losses."""
    torch.set_num_threads(1)
    losses = Losses()
    on_gpus = torch.cuda.device_count() * nodes >= ranks
    trainer = lightning.Trainer(
        accelerator="gpu" if on_gpus else "cpu",
        devices=ranks // nodes,
        num_nodes=nodes,
        strategy=DDPStrategy() if ranks > 1 else "auto",
        max_epochs=options.steps,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,  # Lightning writes what rank 0 has; here each rank has other experts
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LanguageModel(options), loader(options, ranks))
    if not trainer.is_global_zero:
        return
    dense = train(options, 0, 1, None) if check else losses.found
    for step, (loss, reference) in enumerate(zip(losses.found, dense, strict=True)):
        if step % 5 == 0 or step == options.steps - 1:
            print(f"step {step:3d}  loss {loss:.5f}" + (f"  dense {reference:.5f}" if check else ""))
    worst = max(abs(a - b) / b for a, b in zip(losses.found, dense, strict=True))
    if check:
        print(f"largest difference from the dense run: {worst:.1e} of the loss")
    if worst > 1e-3 or losses.found[-1] > 0.7 * losses.found[0]:
        raise SystemExit("train_lightning.py: the loss differs from the dense run's, or does not fall")


def main() -> None:
    """Reads the command line. Lightning starts the other ranks with the same one, unless torchrun has."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="a divisor of 8, the number of experts")
    parser.add_argument("--steps", type=int, default=Options.steps)
    parser.add_argument("--check", action="store_true", help="compare with one process that holds everything")
    given = parser.parse_args()
    options = Options(steps=given.steps)
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if by_torchrun else given.ranks
    nodes = ranks // int(os.environ["LOCAL_WORLD_SIZE"]) if by_torchrun else 1
    if ranks < 1 or options.experts % ranks:
        parser.error(f"--ranks: got {ranks}; allowed are the divisors of {options.experts}")
    run(options, ranks, nodes, given.check)


if __name__ == "__main__":
    main()
