"""The page of the C++ headers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

HEADERS = ["buffer.hpp", "bootstrap.hpp", "config.hpp", "tensor.hpp", "error.hpp"]
INTRODUCTION = """# C++ API

Written by `ci/api_reference.py --write` from the headers in
[cpp/include/deep_moe](../../cpp/include/deep_moe), whose comments it repeats. [docs/cpp.md](../cpp.md) shows
how they are used. All names are in the namespace `deep_moe`. Words: R ranks, T tokens of a rank, H hidden, E
experts, K top-k, L experts of a rank, N received rows, P rows by expert, M the cap on T of low-latency calls;
between nodes D nodes of S ranks.
"""
NAME = re.compile(r"^(?:template .*\n)?(?:struct|class|enum class) (\w+)|(\w+)\(|(\w+)(?:\[\w*\])? = ")


@dataclass(frozen=True)
class Declaration:
    """One name at the top of the namespace."""

    name: str
    comment: str
    """The lines above it, without their slashes; of a group of lines those above the first."""
    code: str


def declarations(text: str) -> tuple[str, list[Declaration]]:
    """The header's opening comment, and what it declares."""
    lines = text.splitlines()
    head = _uncomment(lines[: lines.index("#pragma once")])
    begin = lines.index("namespace deep_moe {") + 1
    end = lines.index("}  // namespace deep_moe")
    made: list[Declaration] = []
    comment = ""
    i = begin
    while i < end:
        line = lines[i]
        if not line.strip():
            comment = ""
            i += 1
        elif line.startswith("//"):
            start = i
            while lines[i].startswith("//"):
                i += 1
            comment = _uncomment(lines[start:i])
        else:
            start, depth = i, 0
            while True:
                code = lines[i].split("//")[0].rstrip()
                depth += code.count("{") + code.count("(") - code.count("}") - code.count(")")
                i += 1
                if depth == 0 and code.endswith((";", "}")):
                    break
            while i < end and lines[i].startswith(" " * 20) and lines[i].lstrip().startswith("//"):
                i += 1  # a trailing comment goes on
            made.append(Declaration(_name(lines[start]), comment, _public("\n".join(lines[start:i]))))
    return head, made


def _uncomment(lines: list[str]) -> str:
    return "\n".join(line.removeprefix("//").removeprefix(" ") for line in lines)


def _name(line: str) -> str:
    found = NAME.search(line)
    if found is None:
        raise ValueError(f"no name in: {line}")
    return next(name for name in found.groups() if name)


def _public(code: str) -> str:
    """A class without what is private."""
    shown = re.sub(r"\n private:\n.*?(?=^\};)", "\n", code, flags=re.DOTALL | re.MULTILINE)
    shown = re.sub(r"\n+  struct Impl;\n+", "\n", shown)
    return re.sub(r"^ public:\n(?=\};)", "", shown, flags=re.MULTILINE)


def _read(root: Path, header: str) -> tuple[str, list[Declaration]]:
    return declarations((root / "cpp" / "include" / "deep_moe" / header).read_text(encoding="utf-8"))


def page(root: Path) -> str:
    """The whole page."""
    there = sorted(path.name for path in (root / "cpp" / "include" / "deep_moe").glob("*.hpp"))
    if there != sorted(HEADERS):
        raise ValueError(f"ci/api/headers.py lists {sorted(HEADERS)}; in cpp/include/deep_moe are {there}")
    lines = [INTRODUCTION]
    for header in HEADERS:
        head, every = _read(root, header)
        lines += [f"## deep_moe/{header}", "", _prose(head), ""]
        for one in every:
            lines += [f"### `{one.name}`", "", _prose(one.comment), "", "```cpp", one.code, "```", ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _prose(comment: str) -> str:
    """A comment is plain text; stars and brackets in it mean themselves."""
    parts = re.split(r"(`[^`]*`)", comment)
    return "".join(part if part.startswith("`") else re.sub(r"([*<])", r"\\\1", part) for part in parts)


def problems(root: Path) -> list[str]:
    """Declarations that no comment explains: none above, and not one for each member inside."""
    found = []
    for header in HEADERS:
        for one in _read(root, header)[1]:
            if not one.comment and not _explained_inside(one.code):
                found.append(f"deep_moe/{header}: {one.name}: no comment")
    return found


def _explained_inside(code: str) -> bool:
    if "{\n" not in code:
        return "//" in code
    above = False
    for line in code.splitlines()[1:-1]:
        bare = line.split("//")[0].strip()
        if not bare:
            above = "//" in line
        elif "//" not in line and not above and bare.endswith(";"):
            return False
    return True
