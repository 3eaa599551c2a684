"""The Python examples on GPUs, which their ranks take by themselves where there are some."""

from __future__ import annotations

import pytest

from ..cpu.test_examples import (
    FOLDER,
    errors_of_decoding,
    errors_of_grouped_gemms,
    losses_of,
    needs_lightning,
    run,
)

pytestmark = pytest.mark.gpus(1)


def test_training_has_the_losses_of_the_dense_run() -> None:
    """Experts on GPUs against one process on the CPU."""
    losses_of(run(str(FOLDER / "train_moe.py"), "--ranks", "2", "--check"))


@pytest.mark.gpus(2)
@needs_lightning
def test_training_with_lightning() -> None:
    """Lightning wants a GPU for each rank."""
    losses_of(run(str(FOLDER / "train_lightning.py"), "--ranks", "2", "--check"))


def test_decoding_is_that_of_one_process() -> None:
    assert all(error < 1e-4 for error in errors_of_decoding(2))


def test_grouped_gemms_give_what_one_process_does() -> None:
    assert all(error < 0.02 for error in errors_of_grouped_gemms(2))
