"""The bench's rank process with a fault in rank 1, chosen by DEEP_MOE_TEST_BREAK: wrong, raise or kill."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from deep_moe.cli import exchange_jobs, worker


def break_rank(how: str) -> None:
    """Makes the first combine of this process go wrong."""
    combine = exchange_jobs.HtJob._in_heap

    def broken(job: exchange_jobs.HtJob, y: Any, recv_x: Any) -> Any:
        if how == "raise":
            raise RuntimeError("broken on purpose")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return combine(job, y * 1.25, recv_x)

    exchange_jobs.HtJob._in_heap = broken  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    if sys.argv[1] == "1":
        break_rank(os.environ["DEEP_MOE_TEST_BREAK"])
    worker.main()
