#!/usr/bin/env python3
"""Writes docs/api/python.md and docs/api/cpp.md from the docstrings and from the headers' comments.

    python ci/api_reference.py           # says which page is out of date, and what has no documentation
    python ci/api_reference.py --write   # writes the pages

Reads the sources alone: nothing is imported, so neither torch nor the compiled module is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from api import headers, python_page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"python.md": python_page, "cpp.md": headers}


def main(arguments: list[str]) -> int:
    failed = 0
    for name, source in PAGES.items():
        page, text = ROOT / "docs" / "api" / name, source.page(ROOT)
        if arguments == ["--write"]:
            page.parent.mkdir(exist_ok=True)
            page.write_text(text, encoding="utf-8")
        elif not page.exists() or page.read_text(encoding="utf-8") != text:
            print(f"{page.relative_to(ROOT)} is out of date: ci/api_reference.py --write")
            failed = 1
        for problem in source.problems(ROOT):
            print(problem)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
