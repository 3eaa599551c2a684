"""The pages: fenced blocks that say `python run` do run, and links inside the repository lead somewhere."""

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
    targets = [link.split("#")[0] for link in LINK.findall(prose) if not re.match(r"[a-z]+:|#", link)]
    assert [target for target in targets if not (page.parent / target).exists()] == []
