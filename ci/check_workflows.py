"""This project's rules on its workflows, beyond their schema: `check_workflows.py FILE...`

Every action is pinned by a full commit hash with its version beside it; a step runs one script of ci/ that
is there and executable; no job may write but the one that publishes, which runs for a tag alone.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
PINNED = re.compile(r"\s*(?:- )?uses: [\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)*$")
SCRIPT = re.compile(r"ci/[\w.]+\.sh( \$\{\{ matrix\.\w+ \}\}| [\w-]+)*")


def check(file: Path) -> Iterator[str]:
    text = file.read_text()
    for line in text.splitlines():
        if "uses:" in line and not PINNED.fullmatch(line):
            yield f"not pinned by a commit hash with its version in a comment: {line.strip()}"
    workflow: dict[str, Any] = YAML(typ="safe").load(text)
    if workflow.get("permissions") != {"contents": "read"}:
        yield f"permissions are {workflow.get('permissions')}; expected contents: read"
    for name, job in workflow["jobs"].items():
        publishes = any("publish" in step.get("uses", "") for step in job["steps"])
        if "timeout-minutes" not in job:
            yield f"job {name} has no timeout-minutes"
        if job.get("permissions") != ({"id-token": "write"} if publishes else None):
            yield f"job {name} has permissions {job.get('permissions')}"
        if publishes and "startsWith(github.ref, 'refs/tags/v')" not in job.get("if", ""):
            yield f"job {name} publishes without a tag"
        for step in job["steps"]:
            command = step.get("run")
            if command is None:
                continue
            script = ROOT / command.split()[0]
            if not SCRIPT.fullmatch(command) or not os.access(script, os.X_OK):
                yield f"job {name} runs {command!r}, which is no script of ci/"


def main(files: list[str]) -> int:
    wrong = [f"{file}: {problem}" for file in files for problem in check(Path(file))]
    print("\n".join(wrong) if wrong else f"{len(files)} workflows keep the rules")
    return 1 if wrong or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
