"""The pages: blocks that say `python run` do run, links and environment variables are there."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "cpp").rglob("*.md")])
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")


def runnable_blocks() -> list:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            if match[1].split() == ["python", "run"]:
                line = text[: match.start()].count("\n") + 2
                found.append(pytest.param(page, line, match[2], id=f"{page.relative_to(ROOT)}:{line}"))
    return found


BLOCKS = runnable_blocks()


def test_readme_has_a_runnable_example() -> None:
    assert any(str(block.id).startswith("README.md:") for block in BLOCKS)


@pytest.mark.parametrize(("page", "line", "code"), BLOCKS)
def test_block_runs(page: Path, line: int, code: str, tmp_path: Path) -> None:
    # Blank lines in front keep the page's line numbers in tracebacks.
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n" * (line - 1) + code)
    result = subprocess.run(
        [sys.executable, script], cwd=tmp_path, text=True, capture_output=True, timeout=120
    )
    assert result.returncode == 0, f"{page.name}:{line}\n{result.stdout}{result.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = FENCE.sub("", page.read_text())
    links = [link.partition("#") for link in LINK.findall(prose) if not re.match(r"[a-z]+:", link)]
    places = [((page.parent / file) if file else page, anchor) for file, _, anchor in links]
    assert [str(file) for file, _ in places if not file.exists()] == []
    dangling = [(str(file), a) for file, a in places if a and file.suffix == ".md" and a not in anchors(file)]
    assert dangling == []


@functools.cache
def anchors(page: Path) -> set[str]:
    """What may stand behind the # of a link to this page, as GitHub makes it of the headings."""
    prose = FENCE.sub("", page.read_text())
    titles = [
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        for title in re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    ]
    slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r'<a id="([^"]+)"', prose))


def test_variables_are_those_that_are_read() -> None:
    """docs/variables.md has every DEEP_MOE_ variable that the library or the package asks for, no other."""
    asked = set()
    for path in [
        *(ROOT / "cpp").rglob("*.cc"),
        *(ROOT / "cpp").rglob("*.cu"),
        *(ROOT / "cpp").rglob("*.hpp"),
    ]:
        asked |= set(re.findall(r'getenv\("(DEEP_MOE_\w+)"', path.read_text()))
    for path in (ROOT / "python").rglob("*.py"):
        asked |= set(re.findall(r'"(DEEP_MOE_[A-Z_0-9]+)"', path.read_text()))
    page = (ROOT / "docs" / "variables.md").read_text()
    assert set(re.findall(r"^\| `(DEEP_MOE_\w+)` ", page, re.MULTILINE)) == asked
