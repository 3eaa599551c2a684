"""Lets programs written for DeepEP import deep_moe under the names that they know.

Nothing happens until it is asked for, in one of three ways::

    import deep_moe.deep_ep_shim
    deep_moe.deep_ep_shim.install()                   # in this process

    python -m deep_moe.deep_ep_shim program.py ...    # a program (-m module), and its children

    export PYTHONPATH=$(python -m deep_moe.deep_ep_shim --path)${PYTHONPATH:+:$PYTHONPATH}

Then ``deep_ep`` (with ``buffer``, ``buffers.legacy``, ``utils`` and ``utils.event``) and ``deep_ep_cpp`` are
deep_moe's own classes. A DeepEP that is installed or imported already is not taken the place of, unless
``replace=True``, ``--replace`` or ``DEEP_MOE_REPLACE_DEEP_EP=1`` says so.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["NAMES", "REPLACE_VARIABLE", "check", "folder", "install", "is_installed", "uninstall"]

NAMES = ("deep_ep", "deep_ep_cpp")
"""The top-level modules that the shim has."""

REPLACE_VARIABLE = "DEEP_MOE_REPLACE_DEEP_EP"
"""Set to 1, the shim takes the place of an installed DeepEP."""

_FOLDER = str(Path(__file__).resolve().parent / "_as_deep_ep")
_replace = False  # what install() was told


def folder() -> str:
    """The folder to put on ``PYTHONPATH``; it holds the shim's modules and nothing else."""
    return _FOLDER


def is_installed() -> bool:
    """Whether ``import deep_ep`` finds the shim in this process (or has found it)."""
    return any(_is_ours(entry) for entry in sys.path)


def install(*, replace: bool = False) -> None:
    """Makes ``import deep_ep`` and ``import deep_ep_cpp`` give deep_moe from here on, in this process.

    Calling it again changes nothing.

    Args:
        replace: take the place of a DeepEP that is installed or imported. What a program has already taken
            out of an imported one stays what it is.

    Raises:
        ImportError: there is another DeepEP, and ``replace`` is False.
    """
    global _replace
    told = replace or _told_to_replace()
    loaded = [name for name in NAMES if name in sys.modules and not _is_ours(_home(name))]
    if loaded and not told:
        raise ImportError(f"{loaded[0]} is imported already, from {_home(loaded[0])}; {_ADVICE}")
    if not told:
        check()
    if loaded:
        _forget_modules()
    _replace = told
    sys.path[:] = [_FOLDER, *(entry for entry in sys.path if not _is_ours(entry))]
    importlib.invalidate_caches()


def uninstall() -> None:
    """Undoes :func:`install`: from here on ``import deep_ep`` finds what it found before."""
    global _replace
    _replace = False
    sys.path[:] = [entry for entry in sys.path if not _is_ours(entry)]
    if any(name in sys.modules and _is_ours(_home(name)) for name in NAMES):
        _forget_modules()
    importlib.invalidate_caches()


def check() -> None:
    """Raises ImportError if the shim stands before another DeepEP without having been told to replace it."""
    if _replace or _told_to_replace():
        return
    for name in NAMES:
        other = _find_other(name)
        if other is not None:
            raise ImportError(f"{name} is installed, at {other}; {_ADVICE}")


_ADVICE = (
    "deep_moe's shim takes its place only if told: install(replace=True), --replace or "
    f"{REPLACE_VARIABLE}=1; or take {_FOLDER} off PYTHONPATH to use the other"
)


def _told_to_replace() -> bool:
    return os.environ.get(REPLACE_VARIABLE, "") == "1"


def _is_ours(entry: str) -> bool:
    return bool(entry) and os.path.realpath(entry) == os.path.realpath(_FOLDER)


def _home(name: str) -> str:
    """The ``sys.path`` entry that an imported module came from."""
    file = getattr(sys.modules[name], "__file__", None)
    if not file:
        return "an unknown place"
    path = Path(file).resolve()
    return str(path.parent.parent if path.name == "__init__.py" else path.parent)


def _find_other(name: str) -> str | None:
    """Where this module would come from without the shim."""
    elsewhere = [entry for entry in sys.path if not _is_ours(entry)]
    for finder in sys.meta_path:
        if finder is importlib.machinery.PathFinder:
            spec = importlib.machinery.PathFinder.find_spec(name, elsewhere)
        else:
            find = getattr(finder, "find_spec", None)
            spec = find(name, None) if find is not None else None
        # Without an origin it is only a folder of that name.
        if spec is not None and spec.origin is not None and not spec.origin.startswith(_FOLDER + os.sep):
            return str(spec.origin)
    return None


def _forget_modules() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in NAMES]:
        del sys.modules[name]


def main(arguments: Sequence[str]) -> int:
    """``python -m deep_moe.deep_ep_shim``: prints the folder, or runs a program with the shim."""
    parser = argparse.ArgumentParser(
        prog="python -m deep_moe.deep_ep_shim",
        description="Runs a program in which deep_ep is deep_moe.",
        usage="%(prog)s --path | [--replace] [-m] PROGRAM [ARGUMENT ...]",
    )
    parser.add_argument("--path", action="store_true", help="print the folder for PYTHONPATH and leave")
    parser.add_argument("--replace", action="store_true", help="take the place of an installed DeepEP")
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module, not a file")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="what to run, and its arguments")
    given = parser.parse_args(arguments)
    if given.path:
        print(_FOLDER)
        return 0
    if not given.program:
        parser.error("PROGRAM is missing; or give --path")
    try:
        install(replace=given.replace)
    except ImportError as error:
        print(f"deep_moe.deep_ep_shim: {error}", file=sys.stderr)
        return 1
    # Processes that the program starts find the shim as well.
    paths = [_FOLDER, *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    if given.replace:
        os.environ[REPLACE_VARIABLE] = "1"
    sys.argv = list(given.program)
    if given.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(given.program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(given.program[0]).resolve().parent))
        runpy.run_path(given.program[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    # As the module that others import, so that there is one _replace.
    from deep_moe import deep_ep_shim

    sys.exit(deep_ep_shim.main(sys.argv[1:]))
