"""The tuning file: what of it fits, what is refused, and that nothing in it can fail a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe import tuning
from deep_moe.tuning import Entry

H200 = Entry("NVIDIA H200", 8, 7168, "bf16", dispatch_sms=16, combine_sms=12)
BUILT_IN = 20


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The tuning file of this test, on a machine of H200 with nothing set by set_num_sms."""
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "tuning.json"))
    monkeypatch.setattr(tuning, "hardware", lambda: "NVIDIA H200")
    monkeypatch.setattr(tuning, "_ranks_are_threads", lambda: False)
    monkeypatch.setattr(deep_moe.Buffer, "_is_num_sms_set", False)
    monkeypatch.setattr(deep_moe.Buffer, "num_sms", BUILT_IN)
    tuning._load.cache_clear()
    yield tmp_path / "tuning.json"
    tuning._load.cache_clear()


def configured(ranks: int = 8) -> tuple[int, int]:
    """SMs of the Configs for dispatch and combine."""
    buffer = deep_moe.Buffer
    return buffer.get_dispatch_config(ranks).num_sms, buffer.get_combine_config(ranks).num_sms


def document(change: dict[str, Any]) -> str:
    """A file with one entry, of which something is changed."""
    return json.dumps({"schema": 1, "entries": [asdict(H200) | change]})


# ---- what fits ----
def test_configs_take_what_fits(path: Path) -> None:
    tuning.store(path, [H200])
    assert configured() == (16, 12)
    built_in = deep_moe._C.dispatch_config(8, 16)
    assert deep_moe.Buffer.get_dispatch_config(8) == built_in  # all else is built in


@pytest.mark.parametrize("other", [{"hardware": "NVIDIA H100"}, {"ranks": 4}, {"ranks_per_gpu": 8}])
def test_what_does_not_fit_leaves_the_built_in_values(path: Path, other: dict[str, Any]) -> None:
    tuning.store(path, [replace(H200, **other)])
    assert configured() == (BUILT_IN, BUILT_IN)


def test_what_was_set_wins(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.store(path, [H200])
    monkeypatch.setattr(deep_moe.Buffer, "num_sms", 7)
    assert configured() == (7, 7)
    deep_moe.Buffer.set_num_sms(BUILT_IN)
    assert configured() == (BUILT_IN, BUILT_IN)


def test_calls_without_a_measurement_are_built_in(path: Path) -> None:
    tuning.store(path, [replace(H200, combine_sms=None)])
    assert configured() == (16, BUILT_IN)


def test_without_a_size_the_most_of_all_sizes_counts(path: Path) -> None:
    entries = [H200, replace(H200, hidden=2048, dispatch_sms=24, combine_sms=8)]
    tuning.store(path, [*entries, replace(H200, dtype="fp8", dispatch_sms=10)])
    assert configured() == (24, 12)
    assert tuning.num_sms("dispatch", 8, 7168) == 16
    assert tuning.num_sms("dispatch", 8, 7168, torch.float8_e4m3fn) == 10
    assert tuning.num_sms("combine", 8, 2048, torch.bfloat16) == 8
    assert tuning.num_sms("dispatch", 8, 2048, "fp8") is None
    assert tuning.num_sms("dispatch", 8, 4096) is None
    with pytest.raises(ValueError, match="call: got 'gather'"):
        tuning.num_sms("gather", 8)


def test_ranks_that_share_a_gpu_are_a_case_of_their_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.store(path, [replace(H200, ranks=2, ranks_per_gpu=2)])
    assert configured(2) == (BUILT_IN, BUILT_IN)
    monkeypatch.setattr(tuning, "_ranks_are_threads", lambda: True)
    assert configured(2) == (16, 12)


@pytest.mark.parametrize("ranks", [0, -1])
def test_wrong_numbers_of_ranks_are_refused_as_ever(path: Path, ranks: int) -> None:
    tuning.store(path, [H200])
    with pytest.raises(ValueError, match="num_ranks"):
        deep_moe.Buffer.get_dispatch_config(ranks)


# ---- files that cannot be used ----
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("\x00\xff", "not JSON"),
        ("[]", "schema None"),
        ('{"schema": 2, "entries": []}', "schema 2, this version of deep_moe reads 1"),
        ('{"schema": 1}', "no list of entries"),
        ('{"schema": 1, "entries": [3]}', "entry 0: no object"),
        ('{"schema": 1, "entries": [{"ranks": 8}]}', "entry 0: hardware, ranks, hidden and dtype"),
        (
            document({"ranks": "8"}),
            "entry 0: ranks is no number",
        ),
        (document({"hardware": [1]}), "hardware is no text"),
        (document({"dispatch_sms": 0}), "dispatch_sms is no"),
        (document({"combine_sms": True}), "combine_sms is no"),
        (document({"combine_sms": 9999}), "combine_sms is no"),
    ],
    ids=range(13),
)
def test_a_broken_file_warns_once(path: Path, text: str, says: str) -> None:
    path.write_bytes(text.encode("latin-1"))
    with pytest.warns(RuntimeWarning, match="built-in values are used") as caught:
        assert configured() == (BUILT_IN, BUILT_IN)
        assert configured() == (BUILT_IN, BUILT_IN)
    (warning,) = caught
    assert says in str(warning.message) and str(path) in str(warning.message)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        tuning.store(path, [H200])
    assert path.read_bytes() == text.encode("latin-1")


def test_a_named_file_that_is_not_there_warns(path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"tuning\.json: No such file"):
        assert configured() == (BUILT_IN, BUILT_IN)


def test_fields_of_later_versions_are_left_out(path: Path) -> None:
    path.write_text(document({"new": 1}))
    assert configured() == (16, 12)


# ---- where the file is ----
def test_the_users_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tuning.VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(path.parent))
    found = tuning.tuning_file()
    assert found == path.parent / "deep_moe" / "tuning.json"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a user without one hears nothing
        assert configured() == (BUILT_IN, BUILT_IN)
    tuning._load.cache_clear()
    tuning.store(found, [H200])
    assert configured() == (16, 12)
    monkeypatch.setenv(tuning.VARIABLE, "")
    assert tuning.tuning_file() is None and configured() == (BUILT_IN, BUILT_IN)
    monkeypatch.delenv(tuning.VARIABLE)
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert tuning.tuning_file() == Path("/home/somebody/.config/deep_moe/tuning.json")


def test_a_process_finds_it_by_its_own_hardware(tmp_path: Path) -> None:
    """Nothing is put in the way here: another process on this machine, whatever that is."""
    path = tmp_path / "tuning.json"
    here = tuning.hardware()
    assert here is not None
    tuning.store(path, [Entry(here, 3, 256, "bf16", 0, dispatch_sms=5, combine_sms=6)])
    program = (
        "from deep_moe import Buffer as b; "
        "print(b.get_dispatch_config(3).num_sms, b.get_combine_config(3).num_sms, "
        "b.get_dispatch_config(2).num_sms)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {tuning.VARIABLE: str(path)},
    )
    assert done.stdout.split() == ["5", "6", "20"], done.stderr


# ---- writing ----
def test_entries_of_the_same_key_are_replaced(path: Path) -> None:
    other = replace(H200, ranks=2)
    tuning.store(path, [H200, other])
    tuning.store(path, [replace(H200, dispatch_sms=30)])
    assert tuning.read(path) == [replace(H200, dispatch_sms=30), other]


def test_writing_is_all_or_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.store(path, [H200])
    before = path.read_bytes()

    def fails(*_: Any) -> None:
        raise OSError("no room")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fails)
            with pytest.raises(OSError, match="no room"):
                tuning.store(path, [replace(H200, ranks=2)])
        assert path.read_bytes() == before
        assert [file.name for file in path.parent.iterdir()] == ["tuning.json"]


def test_a_link_stays_one(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "file.json"
    path.symlink_to(target)
    tuning.store(path, [H200])
    assert path.is_symlink() and tuning.read(target) == [H200]
