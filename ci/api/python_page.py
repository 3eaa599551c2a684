"""The page of the Python API."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import markdown
from .sources import (
    Member,
    Source,
    constructor,
    find,
    has_decorator,
    is_record,
    members_of,
    parameters,
    read,
)

# Modules in the order of the page, and which of their names; none: __all__.
MODULES: dict[str, list[str]] = {
    "deep_moe": [],
    "deep_moe.nn": [],
    "deep_moe.comm": ["Comm", "ThreadComm"],
    "deep_moe.events": ["CommStream"],
    "deep_moe.planning": [],
    "deep_moe.reference": [],
    "deep_moe.deep_ep_shim": [],
}
INTRODUCTION = """# Python API

Written by `ci/api_reference.py --write` from the docstrings. The C++ headers are on [their own page](cpp.md).

Words: R ranks, T tokens of a rank, H hidden, E experts, K top-k, L experts of a rank, N received rows, P rows
by expert, D nodes, M the cap on T of low-latency calls. Shapes and dtypes stand as `[T, H] float32`. Unless
something else is said, tensors are on the Buffer's device.
"""
WIDTH = 100
SHAPE = re.compile(r"\[[^\]`]+\]")
DTYPE = re.compile(r"\b(u?int\d+|b?float\d+\w*|bool|fp32|dtype|types?)\b|:(meth|func|class):|as given to")


@dataclass(frozen=True)
class Entry:
    """A public name of a module."""

    module: str
    name: str
    source: Source
    node: ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    def members(self) -> list[Member]:
        return (
            list(members_of(self.source, self.node).values()) if isinstance(self.node, ast.ClassDef) else []
        )

    def shared(self) -> str:
        """What the name's file says of the arguments of all its functions, if it does."""
        return self.source.doc if "mean the same everywhere" in self.source.doc else ""

    def doc(self) -> str:
        if isinstance(self.node, ast.FunctionDef | ast.ClassDef):
            return ast.get_docstring(self.node) or ""
        return self.source.said_of(self.source.bodies[0], self.node)


def file_of(root: Path, module: str) -> Path:
    base = (root / "python").joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def entries(root: Path) -> Iterator[Entry]:
    """All public names, in the order of the page."""
    for module, names in MODULES.items():
        source = read(file_of(root, module))
        for name in names or source.names:
            yield Entry(module, name, *find(source, name))


# ---- the page ----
def signature(name: str, function: ast.FunctionDef) -> list[str]:
    """The call, on one line if it is short."""
    given = function.args
    shown: list[str] = []
    defaults = [None] * (len(given.args) - len(given.defaults)) + list(given.defaults)
    for one, default in zip(given.args, defaults, strict=True):
        if one.arg not in ("self", "cls"):
            shown.append(_parameter(one, default))
    if given.posonlyargs:
        shown = [_parameter(one, None) for one in given.posonlyargs if one.arg != "self"] + ["/"] + shown
    if given.kwonlyargs:
        shown.append("*")
        shown += [_parameter(one, given.kw_defaults[i]) for i, one in enumerate(given.kwonlyargs)]
    back = f" -> {ast.unparse(function.returns)}" if function.returns and function.name != "__init__" else ""
    line = f"{name}({', '.join(shown)}){back}"
    if len(line) > WIDTH:
        line = "\n".join([f"{name}(", *(f"    {one}," for one in shown), f"){back}"])
    return ["```python", line, "```", ""]


def _parameter(one: ast.arg, default: ast.expr | None) -> str:
    text = one.arg + (f": {ast.unparse(one.annotation)}" if one.annotation else "")
    return text if default is None else f"{text} = {ast.unparse(default)}"


def _links(every: list[Entry]) -> set[str]:
    known = set(MODULES)
    for entry in every:
        known.add(entry.path)
        known |= {f"{entry.path}.{member.name}" for member in entry.members()}
    return known


class Linker:
    """Turns the target of a role into a link to its place on the page."""

    def __init__(self, known: set[str], *scopes: str) -> None:
        self.known, self.scopes = known, scopes

    def __call__(self, target: str) -> str:
        for path in (*(f"{scope}.{target}" for scope in self.scopes), f"deep_moe.{target}", target):
            if path in self.known:
                return f"[`{target.removeprefix('deep_moe.')}`](#{path})"
        raise KeyError(f"{self.scopes[0]}: refers to {target}, which is not on the page")


def heading(level: int, path: str, name: str, kind: str = "") -> list[str]:
    return [f'<a id="{path}"></a>', "", f"{'#' * level} {name}" + (f" ({kind})" if kind else ""), ""]


def _annotation(node: ast.stmt) -> str:
    return f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""


def _method(path: str, member: Member, link: Linker) -> list[str]:
    node = member.node
    assert isinstance(node, ast.FunctionDef)
    kinds = {"staticmethod": "static", "classmethod": "of the class", "property": "property"}
    kind = next((word for name, word in kinds.items() if has_decorator(node, name)), "")
    lines = heading(4, f"{path}.{member.name}", f"`{member.name}`", kind)
    if kind == "property":
        lines += [
            "```python",
            f"{member.name}: {ast.unparse(node.returns) if node.returns else ''}",
            "```",
            "",
        ]
    else:
        lines += signature(member.name, node)
    return lines + markdown.docstring(member.doc, link)


def _class(entry: Entry, known: set[str]) -> list[str]:
    node = entry.node
    assert isinstance(node, ast.ClassDef)
    link = Linker(known, entry.path, entry.module)
    lines = heading(3, entry.path, f"`{entry.name}`", "class")
    made_by = constructor(entry.source, node)
    if made_by is not None:
        lines += signature(entry.name, made_by)
    bases = [ast.unparse(base) for base in node.bases]
    if is_record(node):
        lines += [f"A {'named tuple' if 'NamedTuple' in bases else 'frozen dataclass'}.", ""]
    elif made_by is None and bases and bases != ["Protocol"]:
        lines += [f"A {' and a '.join(f'`{base}`' for base in bases)}.", ""]
    lines += markdown.docstring(entry.doc(), link)
    members = entry.members()
    fields = [one for one in members if not isinstance(one.node, ast.FunctionDef)]
    if is_record(node):
        for one in fields:
            said = " ".join(markdown.prose(one.doc, link).split())
            lines.append(f"- `{one.name}{_annotation(one.node)}`: {said}")
        lines += [""] * bool(fields)
    functions = {one.name: one for one in members if isinstance(one.node, ast.FunctionDef)}
    for one in functions.values():
        lines += _method(entry.path, one, link)
    for one in fields:
        same = one.node.value if isinstance(one.node, ast.Assign) else None
        if isinstance(same, ast.Name) and same.id in functions:
            lines += heading(4, f"{entry.path}.{one.name}", f"`{one.name}`")
            lines += [f"The same as {link(same.id)}.", ""]
    return lines


def page(root: Path) -> str:
    """The whole page."""
    every = list(entries(root))
    known = _links(every)
    lines = [INTRODUCTION, ""]
    for module in MODULES:
        mine = [entry for entry in every if entry.module == module]
        lines += heading(2, module, f"`{module}`")
        lines += markdown.docstring(read(file_of(root, module)).doc, Linker(known, module))
        lines += [" · ".join(f"[`{entry.name}`](#{entry.path})" for entry in mine), ""]
        for entry in mine:
            if isinstance(entry.node, ast.ClassDef):
                lines += _class(entry, known)
                continue
            lines += heading(3, entry.path, f"`{entry.name}`")
            if isinstance(entry.node, ast.FunctionDef):
                lines += signature(entry.name, entry.node)
            lines += markdown.docstring(entry.doc(), Linker(known, module))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


# ---- what is missing ----
def problems(root: Path) -> list[str]:
    """Public names without documentation, and documentation that leaves something out."""
    found = []
    for entry in entries(root):
        doc = entry.doc()
        if not doc:
            found.append(f"{entry.path}: no docstring")
        if isinstance(entry.node, ast.FunctionDef):
            found += _left_out(entry.path, entry.node, doc, entry.shared())
        elif isinstance(entry.node, ast.ClassDef):
            made_by = constructor(entry.source, entry.node)
            if made_by is not None:
                found += _left_out(entry.path, made_by, doc)
            found += _members_left_out(entry, doc)
    return found


def _members_left_out(entry: Entry, doc: str) -> Iterator[str]:
    assert isinstance(entry.node, ast.ClassDef)
    members = entry.members()
    functions = {one.name for one in members if isinstance(one.node, ast.FunctionDef)}
    for one in members:
        path = f"{entry.path}.{one.name}"
        if isinstance(one.node, ast.FunctionDef):
            if not one.doc:
                yield f"{path}: no docstring"
            yield from _left_out(path, one.node, one.doc)
        elif is_record(entry.node):
            if not one.doc:
                yield f"{path}: nothing says what the field is"
            elif "Tensor" in _annotation(one.node) and not (SHAPE.search(one.doc) and DTYPE.search(one.doc)):
                yield f"{path}: a tensor without shape and dtype"
        elif not (
            isinstance(one.node, ast.Assign) and ast.unparse(one.node.value) in functions
        ) and not _says(doc, one.name):
            yield f"{path}: the class's docstring does not name it"


def _left_out(path: str, function: ast.FunctionDef, doc: str, shared: str = "") -> Iterator[str]:
    """``shared``: what the module says of the arguments of all its functions."""
    for one in parameters(function):
        if not _explains(doc, one.arg) and not _says(shared, one.arg):
            yield f"{path}: does not say what {one.arg} is"
            continue
        annotation = ast.unparse(one.annotation) if one.annotation else ""
        of_handle = annotation.startswith("tuple[") or annotation == "DispatchHandle"
        if re.search(r"\bTensor\b|\bPayload\b", annotation) and not of_handle:
            said = _about(doc, one.arg) if _explains(doc, one.arg) else shared
            if not SHAPE.search(said) and not DTYPE.search(said):
                yield f"{path}: no shape for {one.arg}"
    raised = {
        ast.unparse(one.exc.func)
        for one in ast.walk(function)
        if isinstance(one, ast.Raise) and isinstance(one.exc, ast.Call)
    }
    for error in sorted(raised):
        if not _says(doc, error):
            yield f"{path}: raises {error} and does not say when"
    if function.returns is not None and "Tensor" in ast.unparse(function.returns):
        returned = doc.split("Returns:")[-1]
        if not SHAPE.search(returned):
            yield f"{path}: no shape for what it returns"


def _says(doc: str, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", doc) is not None


def _explains(doc: str, name: str) -> bool:
    """Whether ``Args`` has the name; without ``Args``, whether the text does."""
    if "Args:\n" not in doc:
        return _says(doc, name)
    arguments = doc.split("Args:\n")[1]
    return (
        re.search(rf"^ +(?:[\w, ]*\W)?{re.escape(name)}(?:, [\w, ]*)?: ", arguments, re.MULTILINE) is not None
    )


def _about(doc: str, name: str) -> str:
    """The entry of Args for this name; without one the whole docstring."""
    entry = re.search(rf"^ +(?:[\w, ]*\b)?{re.escape(name)}\b[\w, ]*: .*(?:\n {{8,}}.*)*", doc, re.MULTILINE)
    return entry[0] if entry else doc
