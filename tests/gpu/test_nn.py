"""``deep_moe.nn`` on GPUs: the CPU's tests, with the gradients of ranks that are threads or processes.

torch runs backward on one thread a GPU, for all ranks that are threads: their calls there wait for no peer on
the host. torch's default compiler measures on the whole GPU, so that its ranks are processes.
"""

from __future__ import annotations

import pytest

from ..cpu import test_nn as on_cpus
from ..cpu.test_nn import CASES
from ..support.inputs import Case

pytestmark = pytest.mark.gpus(1)


@pytest.mark.parametrize("worst", [False, True], ids=["exact", "worst"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_those_of_the_dense_layer(case: Case, worst: bool) -> None:
    on_cpus.test_gradients_are_those_of_the_dense_layer(case, worst, "gpu thread")


@pytest.mark.parametrize("worst", [False, True], ids=["exact", "worst"])
def test_gradients_between_processes(worst: bool, process_form: str) -> None:
    on_cpus.test_gradients_are_those_of_the_dense_layer(CASES[0], worst, process_form)


@pytest.mark.parametrize("worst", [False, True], ids=["exact", "worst"])
def test_gradients_between_nodes(worst: bool, form: str) -> None:
    on_cpus.test_gradients_between_nodes(2, worst, form)


@pytest.mark.parametrize(
    "test",
    [
        on_cpus.test_what_comes_back,
        on_cpus.test_a_tail_of_old_nans_stays_out_of_the_gradients,
        on_cpus.test_gradients_of_weights_bias_and_dispatch_by_handle,
        on_cpus.test_gradients_by_handle_between_nodes,
        on_cpus.test_gradients_of_gradients,
        on_cpus.test_overlap_by_the_events_context,
    ],
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_results(test: object, form: str) -> None:
    assert callable(test)
    test(form)


@pytest.mark.parametrize("worst", [False, True], ids=["exact", "worst"])
def test_compiled_without_a_graph_break(worst: bool, form: str) -> None:
    """The whole layer in one graph: fullgraph=True."""
    on_cpus.test_compiled_without_a_graph_break(CASES[0], worst, form)


@pytest.mark.slow
def test_compiled_by_inductor(process_form: str) -> None:
    on_cpus.test_compiled_by_inductor(process_form)


def test_the_graph_has_the_operators(process_form: str) -> None:
    on_cpus.test_the_graph_has_the_operators(process_form)


@pytest.mark.parametrize("worst", [0, 20])
def test_operators_keep_torchs_rules(worst: int, process_form: str) -> None:
    on_cpus.test_operators_keep_torchs_rules(worst, process_form)
