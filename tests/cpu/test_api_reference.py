"""docs/api: the pages are what the docstrings and headers say, and these leave nothing out."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ci.api import headers, markdown, python_page

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {"python.md": python_page, "cpp.md": headers}


def text_of(name: str) -> str:
    return (ROOT / "docs" / "api" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SOURCES)
def test_page_is_what_the_sources_say(name: str) -> None:
    """If not: ci/api_reference.py --write."""
    assert text_of(name) == SOURCES[name].page(ROOT)


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_public_is_left_out(name: str) -> None:
    assert SOURCES[name].problems(ROOT) == []


@pytest.mark.parametrize("name", SOURCES)
def test_page_names_no_host_and_no_machine(name: str) -> None:
    assert re.findall(r"\w+://\S+|(?<![\w.>)])/(?:home|tmp|root|work|usr|opt)\b\S*", text_of(name)) == []


def test_links_within_the_page_lead_somewhere() -> None:
    page = text_of("python.md")
    targets = set(re.findall(r"\]\(#([^)]+)\)", page))
    assert len(targets) > 60
    assert targets - set(re.findall(r'<a id="([^"]+)"></a>', page)) == set()


# ---- the page and the installed package ----
def public_objects() -> list[tuple[str, str, object]]:
    """``(module, path, object)`` of what can be imported, members of classes included."""
    found: list[tuple[str, str, object]] = []
    for module, some in python_page.MODULES.items():
        imported = importlib.import_module(module)
        for name in some or imported.__all__:
            value = getattr(imported, name)
            found.append((module, f"{module}.{name}", value))
            if inspect.isclass(value):
                members = [one for one in dir(value) if not one.startswith("_")]
                found += [(module, f"{module}.{name}.{one}", getattr(value, one)) for one in members]
    return found


def of_the_package(value: object) -> bool:
    return str(getattr(value, "__module__", "")).startswith("deep_moe")


def test_page_has_every_function_and_class_that_can_be_imported() -> None:
    page = text_of("python.md")
    wanted = [path for _, path, value in public_objects() if callable(value) and of_the_package(value)]
    assert len(wanted) > 80
    assert [path for path in wanted if f'<a id="{path}"></a>' not in page] == []


def test_page_repeats_the_docstrings_of_the_installed_package() -> None:
    page = text_of("python.md")
    known = set(re.findall(r'<a id="([^"]+)"></a>', page))
    compared = 0
    for module, path, value in public_objects():
        owner = path.rsplit(".", 1)[0]
        compiled = "deep_moe._C" in (getattr(value, "__module__", ""), owner) or "Config" in path
        if not callable(value) or not of_the_package(value) or compiled:  # ci/stubs.sh compares those
            continue
        link = python_page.Linker(known, *([path] if inspect.isclass(value) else [owner]), module)
        doc = markdown.docstring(inspect.getdoc(value) or "", link)
        assert re.sub(r"\n{3,}", "\n\n", "\n".join(doc)).strip() in page, path
        compared += 1
    assert compared > 80


def test_signatures_are_those_of_the_installed_package() -> None:
    page = text_of("python.md")
    for _, path, value in public_objects():
        if (
            not inspect.isfunction(value)
            or not of_the_package(value)
            or value.__name__ != path.split(".")[-1]
        ):
            continue
        shown = page.split(f'<a id="{path}"></a>')[1].split("```")[1]
        names = [name for name in inspect.signature(value).parameters if name not in ("self", "cls")]
        at = [re.search(rf"[(,\s]{name}\b", shown) for name in names]
        assert None not in at, (path, names, shown)
        starts = [one.start() for one in at if one is not None]
        assert starts == sorted(starts), path


# ---- and it would be noticed ----
Change = Callable[[str], str]


def swap(old: str, new: str) -> Change:
    def change(text: str) -> str:
        assert text.count(old) == 1, old
        return text.replace(old, new)

    return change


PYTHON = "python/deep_moe"
HEADER = "cpp/include/deep_moe/buffer.hpp"
CHANGES = {
    "no docstring": (
        f"{PYTHON}/buffer.py",
        swap(
            "An event of the current stream of the current device at this moment, for ``previous_event``.", ""
        ),
        "deep_moe.Buffer.capture: no docstring",
    ),
    "an argument": (
        f"{PYTHON}/buffer.py",
        swap("            out: ``[T, H]`` of x's dtype, for the result.\n", ""),
        "deep_moe.Buffer.combine: does not say what out is",
    ),
    "a shape": (
        f"{PYTHON}/_low_latency.py",
        swap("out: ``[T, H]`` of x's dtype, for the result.", "out: where the result goes."),
        "deep_moe.Buffer.low_latency_combine: no shape for out",
    ),
    "an error": (
        f"{PYTHON}/events.py",
        swap("            TypeError: ``hook`` cannot be called.\n", ""),
        "deep_moe.EventOverlap.register_hook_after_wait: raises TypeError and does not say when",
    ),
    "a field": (
        f"{PYTHON}/handles.py",
        swap('    """[bytes] uint8."""\n', ""),
        "deep_moe.DeviceLowLatencyHandle.words: nothing says what the field is",
    ),
    "a field's dtype": (
        f"{PYTHON}/handles.py",
        swap('"""[bytes] uint8."""', '"""The words."""'),
        "deep_moe.DeviceLowLatencyHandle.words: a tensor without shape and dtype",
    ),
    "a comment": (
        HEADER,
        swap("// Sums with the tokens' weights.\n", ""),
        "deep_moe/buffer.hpp: LowLatencyCombineArgs: no comment",
    ),
}


def copy_sources(folder: Path) -> Path:
    for part in (PYTHON, "cpp/include"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return folder


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_taken_away_is_missed(what: str, tmp_path: Path) -> None:
    file, change, message = CHANGES[what]
    copy = copy_sources(tmp_path)
    (copy / file).write_text(change((copy / file).read_text(encoding="utf-8")), encoding="utf-8")
    name = "cpp.md" if file == HEADER else "python.md"
    assert message in SOURCES[name].problems(copy)
    assert SOURCES[name].page(copy) != text_of(name)


def test_reference_to_nothing_is_an_error(tmp_path: Path) -> None:
    copy = copy_sources(tmp_path)
    file = copy / PYTHON / "comm.py"
    file.write_text(file.read_text(encoding="utf-8").replace(":func:`thread_comms`", ":func:`no_comms`"))
    with pytest.raises(KeyError, match="refers to no_comms, which is not on the page"):
        python_page.page(copy)


def test_new_header_has_to_be_listed(tmp_path: Path) -> None:
    copy = copy_sources(tmp_path)
    (copy / "cpp/include/deep_moe/new.hpp").write_text("#pragma once\n")
    with pytest.raises(ValueError, match=r"new\.hpp"):
        headers.page(copy)
