"""The Python examples run as they stand, and do what they say; on GPUs ``gpu/test_examples`` runs them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "python"


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


needs_lightning = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None,
    reason="no PyTorch Lightning: install the extra `lightning` of deep-moe",
)


@pytest.mark.parametrize(
    "example", ["train_moe.py", pytest.param("train_lightning.py", marks=needs_lightning)]
)
def test_training_has_the_losses_of_the_dense_run(example: str) -> None:
    """Loss by loss within rounding, and falling; the ranks are processes that the example starts."""
    losses_of(run(str(FOLDER / example), "--ranks", "2", "--check"))


def losses_of(printed: str) -> list[float]:
    """What a training example has printed; checked."""
    rows = re.findall(r"^step +(\d+)  loss ([\d.]+)  dense ([\d.]+)$", printed, re.MULTILINE)
    losses = [float(loss) for _, loss, _ in rows]
    assert [int(step) for step, _, _ in rows] == [0, 5, 10, 15, 20, 25, 29]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.5 * losses[0]
    for (_, loss, dense), of_ranks in zip(rows, losses, strict=True):
        assert abs(of_ranks - float(dense)) < 1e-4 * float(dense), (loss, dense)
    return losses


@pytest.mark.parametrize(
    "example", ["train_moe.py", pytest.param("train_lightning.py", marks=needs_lightning)]
)
def test_training_under_torchrun(example: str) -> None:
    printed = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
        *(str(FOLDER / example), "--steps", "21", "--check"),
    )
    assert re.search(r"^step  20  loss ", printed, re.MULTILINE)
    assert "largest difference from the dense run" in printed


def test_decoding_is_that_of_one_process() -> None:
    """The example compares; here it matters that it has on every rank, and got there."""
    assert all(error < 1e-5 for error in errors_of_decoding(4))


def errors_of_decoding(ranks: int) -> list[float]:
    """The largest error of each rank."""
    printed = run(str(FOLDER / "decode_loop.py"), "--ranks", str(ranks), "--steps", "8")
    found = re.findall(r"^rank (\d): (\d+) tokens, 8 steps, largest error ([\d.e-]+)$", printed, re.MULTILINE)
    assert sorted((int(rank), int(tokens)) for rank, tokens, _ in found) == [
        (r, 10 + 2 * r) for r in range(ranks)
    ]
    return [float(error) for *_, error in found]


def test_grouped_gemms_give_what_one_process_does() -> None:
    assert all(error < 0.01 for error in errors_of_grouped_gemms(4))


def errors_of_grouped_gemms(ranks: int) -> list[float]:
    """The largest error of each rank."""
    printed = run(str(FOLDER / "grouped_gemm.py"), "--ranks", str(ranks), "--tokens", "30")
    found = re.findall(r"^rank (\d): (\d+) tokens, largest error ([\d.e-]+)$", printed, re.MULTILINE)
    assert sorted((int(rank), int(tokens)) for rank, tokens, _ in found) == [
        (r, 30 + r) for r in range(ranks)
    ]
    return [float(error) for *_, error in found]


def test_ranks_that_do_not_divide_the_experts_are_refused() -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "train_moe.py"), "--ranks", "3"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "--ranks: got 3; allowed are the divisors of 8" in done.stderr
