"""docs/troubleshooting.md: its messages are the library's, none is missing, those of the CPU do come up."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_moe

from ..support.attempts import Attempt, attempt
from ..support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')  # of C++
CPP = sorted(
    path for folder in ("runtime", "cpu", "cuda", "python") for path in ROOT.glob(f"cpp/{folder}/*.cc")
)
PYTHON = sorted(ROOT.glob("python/deep_moe/*.py"))
ERRORS = "|".join(name for name in deep_moe.__all__ if name.endswith("Error"))

# What no user sees unless the library is broken, or what only passes on the text of something else.
INTERNAL = (
    "all_gather: the ranks pass different numbers of bytes",
    "cannot open a control socket",
    "cannot bind a control socket",
    "cannot listen on a control socket",
    "cannot map a segment of ",
    " bytes of scratch memory",
    " cannot pass a segment to rank ",
    "eventfd failed: ",
    " failed: ",
    "cudaGetDevice failed: ",
    " named its segment ",
    "dispatch: the heap has grown, and has no room yet",
    "a broken control message",
    "a descriptor does not travel between machines",
    "it has been freed",
    "its number is out of range",
    " sent an unknown control message",
    ": the kernel has ended without a word to its host",
    " segments already",
    "plain copies: they need the copy engine (sm_90 or later)",
    "timings on GPUs: this build of deep_moe has no CUDA part",
    "the exchange between ranks is open only while a Buffer is made",
    ": the ranks need staging of different sizes: they did not make the same call",
    " belongs into the same capture",
)


def joined(text: str) -> str:
    """C++ in which a string over several lines is one string."""
    return re.sub(r"\"\s*\n\s*\"", "", text)


def strings(path: Path) -> list[str]:
    """The strings of a source file; in those of Python … stands for what is put in."""
    if path.suffix == ".cc":
        return [text.replace('\\"', '"') for text in STRING.findall(joined(path.read_text()))]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values))
    return found


def messages() -> list[str]:
    """The first column of the page's tables; a cell may hold several."""
    rows = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    found = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    return [message for message in found if message not in (*deep_moe.__all__, "ValueError", "TypeError")]


MESSAGES = messages()
SPOKEN = "\n".join(text for path in (*CPP, *PYTHON) for text in strings(path))


def pattern(message: str) -> str:
    return ".+".join(re.escape(part) for part in message.split("…"))


@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_the_librarys(message: str) -> None:
    """All parts of it that do not vary stand in the sources' strings, or are put together of two of them."""
    for part in message.split("…"):
        cuts = [part.strip(" :"), *(match.start() for match in re.finditer(" ", part))]
        whole = cuts[0] in SPOKEN
        halves = any(part[:cut].strip() in SPOKEN and part[cut:] in SPOKEN for cut in cuts[1:])
        assert whole or halves, f"{part!r} of {message!r} is in no string of the library"


def thrown() -> list[tuple[str, str]]:
    """The longest fixed part of each error that is not about an argument."""
    found = []
    for path in CPP:
        text = joined(path.read_text())
        for match in re.finditer(r"throw (?:TimeoutError|" + ERRORS + r")\(", text):
            parts = STRING.findall(text[match.end() : text.index(";", match.end())])
            if parts:
                found.append((path.name, max(parts, key=len)))
    return found


@pytest.mark.parametrize(("file", "part"), thrown())
def test_no_message_is_missing(file: str, part: str) -> None:
    assert part in INTERNAL or part.strip() in PAGE or any(one in part for one in INTERNAL), (
        f"{file} raises {part!r}: put it into docs/troubleshooting.md"
    )


def test_enough_was_found() -> None:
    assert len(MESSAGES) > 60 and len(thrown()) > 40


# ---- those of the CPU, for real ----
def provoke(comm: Any, rank: int) -> dict[str, Attempt]:
    """The errors of one rank by name; the other rank makes the right calls."""
    buffer = deep_moe.Buffer(None, comm=comm, timeout=1.0)
    x, idx = torch.ones(4, 64, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.int64)
    found: dict[str, Attempt] = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        found[name] = attempt(call)

    def dispatch(rows: Any = x, ids: Any = idx, num_experts: int | None = 4, **more: Any) -> Any:
        return buffer.dispatch(rows, topk_idx=ids, num_experts=num_experts, **more)

    def low_latency(**more: Any) -> Any:
        return buffer.low_latency_dispatch(x, idx, 8, 4, use_fp8=False, **more)

    note("odd rows", lambda: dispatch(x[:, :63].contiguous() if rank else x))
    note("strided", lambda: dispatch(torch.ones(64, 4, dtype=torch.bfloat16).t() if rank else x))
    note("wrong id", lambda: dispatch(ids=idx + 9 if rank else idx))
    note("mismatch", lambda: dispatch(num_experts=4 + rank))
    note("no experts", lambda: dispatch(num_experts=None))
    note("nowhere", lambda: buffer.dispatch(x))
    sent = dispatch()
    note("too few rows", lambda: buffer.combine(sent[0][:-1] if rank == 0 else sent[0], sent[4]))
    note("worst", lambda: dispatch(num_worst_tokens=3))
    note("both", lambda: buffer.dispatch(x, handle=sent[4], topk_idx=idx))
    hooks = [low_latency(return_recv_hook=True)[4] for _ in range(3)]
    note("four hooks", lambda: low_latency(return_recv_hook=True))
    note("both ends", lambda: low_latency(return_recv_hook=True, async_finish=True))
    for hook in hooks:
        hook()
    note("hook twice", hooks[0])
    note("no masks", lambda: buffer.low_latency_clean_mask_buffer())
    note("streams", lambda: dispatch(allocate_on_comm_stream=True))
    if rank == 1:
        time.sleep(1.5)
    note("late", dispatch)
    buffer.reset()
    dispatch()
    if rank == 1:
        buffer.destroy()
    note("destroyed", dispatch)
    return found


EXPECTED: dict[str, tuple[int, type[Exception], str]] = {
    "odd rows": (1, ValueError, "rows of … bytes (hidden=…"),
    "strided": (1, ValueError, "a tensor whose last dimension is strided"),
    "wrong id": (1, ValueError, "expert id … in row …, column …"),
    "mismatch": (
        0,
        deep_moe.CallMismatchError,
        "the ranks did not make the same call…: rank … called …, … called …",
    ),
    "no experts": (0, ValueError, next(m for m in MESSAGES if m.startswith("topk_idx alone"))),
    "nowhere": (0, ValueError, next(m for m in MESSAGES if m.startswith("nothing says"))),
    "too few rows": (0, ValueError, ", hidden]: the rows that dispatch gave"),
    "worst": (0, ValueError, "num_worst_tokens: … allows … rows and … arrive there"),
    "both": (0, ValueError, next(m for m in MESSAGES if m.startswith("handle together"))),
    "four hooks": (0, deep_moe.Error, next(m for m in MESSAGES if "are in flight" in m)),
    "both ends": (0, ValueError, next(m for m in MESSAGES if m.startswith("async_finish=True together"))),
    "hook twice": (0, deep_moe.Error, "the hook of … (call …) has been called before; it may be called once"),
    "no masks": (0, ValueError, ": this Buffer was made with enable_shrink=False, which has no masks"),
    "streams": (0, ValueError, next(m for m in MESSAGES if m.startswith("allocate_on_comm_stream"))),
    "late": (0, deep_moe.DeepMoeTimeoutError, "rank … waited … s for rank … in …"),
    "destroyed": (0, deep_moe.PeerLostError, "rank … has destroyed its Buffer while rank … waited for …"),
}
# What the other rank gets.
OTHERS: dict[str, tuple[int, type[Exception], str]] = {
    "odd rows": (0, deep_moe.PeerRefusedError, "rank … refused its …: …"),
    "late": (1, deep_moe.DeepMoeTimeoutError, "rank … gave up: …"),
    "destroyed": (1, deep_moe.DestroyedError, "this Buffer has been destroyed"),
}


def test_messages_of_the_cpu(form: str) -> None:
    results = run_ranks(provoke, 2, form=form)
    for expected in (EXPECTED, OTHERS):
        for name, (rank, kind, message) in expected.items():
            assert message in MESSAGES, message
            results[rank][name].must_be(kind, pattern(message))


def test_messages_about_memory(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_MOE_MAX_HEAP_BYTES", str(1 << 20))

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm)
        x, idx = torch.ones(600, 2048), torch.zeros(600, 1, dtype=torch.int64)
        worst = attempt(lambda: buffer.dispatch(x, topk_idx=idx, num_experts=2, num_worst_tokens=4000))
        return worst, attempt(lambda: buffer.empty(1 << 20, torch.float32))

    worst, empty = run_ranks(rank_main, 1, form=form)[0]
    limit = "a heap of … bytes would need … more, and DEEP_MOE_MAX_HEAP_BYTES allows … in all"
    limit_pattern = pattern(limit)
    worst.must_be(
        deep_moe.BufferTooSmallError, pattern("num_worst_tokens=… needs … bytes of heap: …"), limit_pattern
    )
    empty.must_be(deep_moe.BufferTooSmallError, pattern("empty: … bytes of heap needed: …"), limit_pattern)
    assert limit in MESSAGES
