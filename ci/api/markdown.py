"""Docstrings as Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

SECTION = re.compile(r"^(Args|Attributes|Raises|Returns):$")
ENTRY = re.compile(r"^([\w*]+(?:, [\w*]+)*): ", re.ASCII)
ROLE = re.compile(r":(?:meth|func|class|mod|attr|data|exc):`~?([\w.]+)`")
CODE = re.compile(r"(``.+?``|:\w+:`[^`]+`|`[^`]+`)", re.DOTALL)


def prose(text: str, link: Callable[[str], str]) -> str:
    """Running text: code, references, and no accidental emphasis."""
    parts = CODE.split(text)
    for i, part in enumerate(parts):
        role = ROLE.fullmatch(part)
        if role:
            parts[i] = link(role[1])
        elif part.startswith("``"):
            parts[i] = f"`{' '.join(part[2:-2].split())}`"
        elif not part.startswith("`"):
            parts[i] = re.sub(r"(?<=\w)\*(?=\w)", r"\\*", part)
    return "".join(parts)


def blocks(lines: list[str], link: Callable[[str], str]) -> list[str]:
    """Paragraphs, lists and, behind ``::``, code."""
    made: list[str] = []
    i = 0
    while i < len(lines):
        start = i
        while i < len(lines) and lines[i].strip():
            i += 1
            if lines[i - 1].endswith("::"):
                break
        text = "\n".join(lines[start:i])
        if text.endswith("::"):
            made += [prose(text[:-1], link), ""]
            code = i
            while i < len(lines) and (not lines[i].strip() or lines[i].startswith("    ")):
                i += 1
            body = textwrap.dedent("\n".join(lines[code:i])).strip("\n")
            made += ["```", body, "```", ""]
        elif text:
            made += [prose(text, link), ""]
        else:
            i += 1
    return made


def entries(lines: list[str], link: Callable[[str], str]) -> list[str]:
    """The list of a section: an entry begins where a line is not indented."""
    made: list[list[str]] = []
    for line in lines:
        if line.strip() and (not line.startswith(" ") or not made):
            made.append([line])
        elif line.strip():
            made[-1].append(line)
    items = []
    for one in made:
        text = "\n".join(line.strip() for line in one)
        head = ENTRY.match(text)
        if head:
            names = ", ".join(f"`{name}`" for name in head[1].split(", "))
            text = f"{names}: {prose(text[head.end() :], link)}"
        else:
            text = prose(text, link)
        items.append("- " + text.replace("\n", "\n  "))
    return [*items, ""]


def docstring(text: str, link: Callable[[str], str]) -> list[str]:
    """Lines of Markdown for a docstring that has been cleaned of its indentation."""
    lines, made, plain = text.split("\n"), [], []
    i = 0
    while i < len(lines):
        section = SECTION.match(lines[i])
        if not section:
            plain.append(lines[i])
            i += 1
            continue
        made += blocks(plain, link)
        plain = []
        start = i = i + 1
        while i < len(lines) and (not lines[i].strip() or lines[i].startswith(" ")):
            i += 1
        body = textwrap.dedent("\n".join(lines[start:i])).strip("\n").split("\n")
        made += [f"**{section[1]}**", ""]
        made += blocks(body, link) if section[1] == "Returns" else entries(body, link)
    return made + blocks(plain, link)
