"""What tests need and where they are skipped, the hypothesis profiles, and the two forms of ranks."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from deep_moe._C import build_info

from .support import workers
from .support.ranks import FORMS
from .support.system import num_gpus

TESTS = Path(__file__).parent

# A tuning file of whoever runs the tests is none of theirs.
os.environ["DEEP_MOE_TUNING_FILE"] = ""

# Forked ranks must not inherit a pool of threads, and there are more ranks than cores anyway.
torch.set_num_threads(1)

# A few hundred examples over all property tests in a normal run, always the same; new ones every night. An
# example that hangs costs seconds, so only "nightly" and "shrink" go on to look for a smaller one that fails.
_common = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
}
_every_run = {**_common, "max_examples": 100, "derandomize": True, "database": None}
_no_shrinking = [phase for phase in hypothesis.Phase if phase.name in ("explicit", "generate")]
hypothesis.settings.register_profile("default", phases=_no_shrinking, **_every_run)
hypothesis.settings.register_profile("shrink", **_every_run)
hypothesis.settings.register_profile("nightly", max_examples=2000, **_common)
hypothesis.settings.load_profile(os.environ.get("DEEP_MOE_HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--expect-tier",
        default=os.environ.get("DEEP_MOE_EXPECT_TIER", ""),
        metavar="TIER[,TIER...]",
        help="tiers (cpu, gpus1, gpus2, nodes2, nightly, ...) whose tests must run: a skipped one fails, "
        "and so does a tier of which no test ran; default: DEEP_MOE_EXPECT_TIER",
    )
    parser.addoption(
        "--shard",
        default="1/1",
        metavar="K/N",
        help="the K-th part of N of the tests: parts may run side by side",
    )
    parser.addoption(
        "--nightly",
        action="store_true",
        default=os.environ.get("DEEP_MOE_NIGHTLY", "") == "1",
        help="run tests marked nightly too, and 2000 examples a property; default: DEEP_MOE_NIGHTLY=1",
    )


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "cpu: needs no GPU; every test in tests/cpu",
        "gpus(n): needs at least n CUDA GPUs",
        "nodes(n): needs n hosts",
        "tools(name, ...): needs these programs; the scripts in ci/ install them",
        "nightly: too long for every run; see --nightly",
        "slow: takes more than about ten seconds",
    ):
        config.addinivalue_line("markers", line)
    if config.getoption("--nightly") and "DEEP_MOE_HYPOTHESIS_PROFILE" not in os.environ:
        hypothesis.settings.load_profile("nightly")
    config.stash[_expected] = {tier for tier in config.getoption("--expect-tier").split(",") if tier}
    config.stash[_ran] = set()


_expected: pytest.StashKey[set[str]] = pytest.StashKey()
_ran: pytest.StashKey[set[str]] = pytest.StashKey()


def _number(marker: pytest.Mark) -> int:
    return int(marker.args[0]) if marker.args else 1


def tiers(item: pytest.Item) -> set[str]:
    """The tiers that a test belongs to: what it needs, or the folder that it lies in."""
    found = {f"{m.name}{_number(m)}" for m in item.iter_markers() if m.name in ("gpus", "nodes")}
    found |= {"nightly"} if item.get_closest_marker("nightly") else set()
    return found or {item.path.relative_to(TESTS).parts[0]}


def what_is_missing(item: pytest.Item) -> str | None:
    """Why a test cannot run here; the one place that decides on skipping."""
    for marker in item.iter_markers():
        if marker.name == "gpus" and (here := num_gpus()) < _number(marker):
            return f"needs {_number(marker)} CUDA GPUs, {here} here"
        if marker.name == "gpus" and not build_info()["cuda_transport"]:
            return "this build of deep_moe has no CUDA part"
        if marker.name == "nodes" and (given := int(os.environ.get("DEEP_MOE_TEST_NODES", "1"))) < _number(
            marker
        ):
            return f"needs {_number(marker)} hosts, DEEP_MOE_TEST_NODES says {given}"
        if marker.name == "tools" and (missing := [name for name in marker.args if not shutil.which(name)]):
            return f"needs {', '.join(missing)}"
        if marker.name == "nightly" and not item.config.getoption("--nightly"):
            return "a nightly test: pass --nightly or set DEEP_MOE_NIGHTLY=1"
    return None


def _part(item: pytest.Item, parts: int) -> int:
    """A function with all its parameters is in one part, and so is who shares a fixture of the module."""
    known = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    together = any(one.scope == "module" for of_name in known.values() for one in of_name)
    name = item.path.name + ("" if together else getattr(item, "originalname", item.name))
    return zlib.crc32(name.encode()) % parts


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shard, parts = map(int, config.getoption("--shard").split("/"))
    others = [item for item in items if _part(item, parts) != shard - 1]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
    for item in items:
        if config.getoption("--nightly") and config.pluginmanager.hasplugin("timeout"):
            item.add_marker(pytest.mark.timeout(7200))
        if tiers(item) == {"cpu"}:
            item.add_marker(pytest.mark.cpu)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if reason := what_is_missing(item):
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    wanted = tiers(item) & item.config.stash[_expected]
    if report.when == "call" and not report.skipped:
        item.config.stash[_ran] |= tiers(item)
    if report.skipped and wanted and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{', '.join(sorted(wanted))} is expected to run here, but: {reason}"
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    workers.close_all()
    if _not_run(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for tier in sorted(_not_run(config)):
        terminalreporter.write_line(
            f"FAILED tier {tier}: expected to run here, but none of its tests did", red=True
        )


def _not_run(config: pytest.Config) -> set[str]:
    if config.option.collectonly or config.getoption("--shard") != "1/1":
        return set()
    return config.stash[_expected] - config.stash[_ran]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    """Ranks as processes, or as threads of one process."""
    return str(request.param)


@pytest.fixture
def process_form() -> str:
    """Ranks as processes alone."""
    return "process"


@pytest.fixture
def shared_memory() -> Iterator[None]:
    """Nothing new lies in /dev/shm after the test."""
    folder = Path("/dev/shm")
    before = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    yield
    left = ({entry.name for entry in folder.iterdir()} if folder.is_dir() else set()) - before
    assert not left, f"left in /dev/shm: {sorted(left)}"
