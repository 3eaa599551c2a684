"""The command line of deep_moe: ``deep-moe bench``, ``compare``, ``plot``, ``tune``, ``plan`` and ``doctor``.

Nothing here is imported by ``import deep_moe``; :func:`main` loads the commands when they are asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line with ``argv`` (default: the process's) and returns the exit code."""
    try:
        from .app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"deep-moe: {error.name} is missing; run: pip install typer rich", file=sys.stderr)
        return 1
    return run(list(sys.argv[1:] if argv is None else argv))
