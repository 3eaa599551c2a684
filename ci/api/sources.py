"""Python sources, read without importing them: names, what they stand for, and what is said of them."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass
class Source:
    """One file: its definitions, what it imports from the package, its ``__all__``, its comments by line."""

    path: Path
    doc: str
    definitions: dict[str, Definition] = field(default_factory=dict)
    imports: dict[str, tuple[Path, str]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    comments: dict[int, str] = field(default_factory=dict)
    bodies: dict[int, list[ast.stmt]] = field(default_factory=dict)

    def said_of(self, body: list[ast.stmt], node: ast.stmt) -> str:
        """Of an assignment: the string behind it, or the comment at its end."""
        after = body[body.index(node) + 1 :][:1]
        if after and isinstance(after[0], ast.Expr) and isinstance(after[0].value, ast.Constant):
            return inspect.cleandoc(str(after[0].value.value))
        return self.comments.get(node.end_lineno or 0, "")


@cache
def read(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    source = Source(path, ast.get_docstring(tree) or "")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            source.comments[token.start[0]] = token.string.lstrip("# ")
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            for alias in node.names:
                module = _file_of(path, node.level, node.module or alias.name)
                source.imports[alias.asname or alias.name] = (module, alias.name)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            source.definitions[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            source.definitions[node.target.id] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name == "__all__":
                source.names = list(ast.literal_eval(node.value))
            else:
                source.definitions[name] = node
    source.bodies[0] = tree.body
    return source


def _file_of(path: Path, level: int, module: str) -> Path:
    base = path.parents[level - 1].joinpath(*module.split("."))
    for candidate in (base.with_suffix(".py"), base / "__init__.py", base.with_suffix(".pyi")):
        if candidate.exists():
            return candidate
    raise FileNotFoundError(f"{path}: imports {module}, which is no file")


def find(source: Source, name: str) -> tuple[Source, Definition]:
    """Where a name is defined, through imports."""
    while name not in source.definitions:
        if name not in source.imports:
            raise KeyError(f"{source.path}: {name} is neither defined nor imported here")
        path, name = source.imports[name]
        source = read(path)
    return source, source.definitions[name]


@dataclass(frozen=True)
class Member:
    """A name of a class, with the file that it is from."""

    name: str
    node: ast.FunctionDef | ast.Assign | ast.AnnAssign
    source: Source
    doc: str


def bases_of(source: Source, node: ast.ClassDef) -> list[tuple[Source, ast.ClassDef]]:
    """The bases that are classes of the package."""
    found = []
    for base in node.bases:
        if isinstance(base, ast.Name) and (base.id in source.definitions or base.id in source.imports):
            where, definition = find(source, base.id)
            if isinstance(definition, ast.ClassDef):
                found.append((where, definition))
    return found


def members_of(source: Source, node: ast.ClassDef) -> dict[str, Member]:
    """Public members by name, those of its bases behind; of overloads the last."""
    found: dict[str, Member] = {}
    for one in node.body:
        if isinstance(one, ast.FunctionDef):
            doc = ast.get_docstring(one) or ""
            public = not one.name.startswith("_") or (one.name == "__call__" and doc)
            if public and not any(ast.unparse(d) == "overload" for d in one.decorator_list):
                found[one.name] = Member(one.name, one, source, doc)
        elif isinstance(one, ast.AnnAssign | ast.Assign):
            target = one.target if isinstance(one, ast.AnnAssign) else one.targets[0]
            if isinstance(target, ast.Name) and not target.id.startswith("_"):
                found[target.id] = Member(target.id, one, source, source.said_of(node.body, one))
    for where, base in bases_of(source, node):
        for name, member in members_of(where, base).items():
            found.setdefault(name, member)
    return found


def constructor(source: Source, node: ast.ClassDef) -> ast.FunctionDef | None:
    """The ``__init__`` of the class or of its nearest base that has one."""
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            return one
    for where, base in bases_of(source, node):
        found = constructor(where, base)
        if found is not None:
            return found
    return None


def parameters(function: ast.FunctionDef) -> list[ast.arg]:
    """All but ``self`` and ``cls``."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return [one for one in every if one.arg not in ("self", "cls")]


def has_decorator(node: ast.FunctionDef | ast.ClassDef, name: str) -> bool:
    return any(ast.unparse(one).split("(")[0] == name for one in node.decorator_list)


def is_record(node: ast.ClassDef) -> bool:
    """A dataclass or a NamedTuple: its fields say themselves what they are."""
    return has_decorator(node, "dataclass") or any(ast.unparse(base) == "NamedTuple" for base in node.bases)
