"""A rank process for the tests of deep_moe.cli.launch that does what its plan says; quick to start."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def follow_plan(rank: int, plan: dict[str, Any]) -> None:
    """Does what ``plan`` asks of this rank: raise, kill, exit or sleep; else gives a result."""
    if plan.get("watch"):
        from deep_moe.cli.worker import die_with_parent

        die_with_parent()
    if "pids" in plan:
        (Path(plan["pids"]) / str(os.getpid())).touch()
    print("a word on stderr", file=sys.stderr, flush=True)
    print("a stray print", flush=True)
    print(json.dumps({"phase": "work"}), flush=True)
    if plan.get("raise") == rank:
        raise ValueError("the rows are gone")
    if plan.get("kill") == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    if plan.get("exit") == rank:
        sys.exit(3)
    if plan.get("sleep") in (rank, -1):
        time.sleep(600)
    print(json.dumps({"result": {"rank": rank}}), flush=True)


if __name__ == "__main__":
    try:
        follow_plan(int(sys.argv[1]), json.loads(sys.argv[2]))
    except ValueError as error:
        report = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        print(json.dumps(report), flush=True)
        sys.exit(1)
