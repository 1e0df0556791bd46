"""Threads that a worker process cannot do without.

Should one of them fail, its process would go on to receive tasks that it never runs or never reports, and its parent
would go on to beat for it. So the process ends instead; the parent reports what it held as lost, and starts another.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from orchestrator.telemetry import get_logger

log = get_logger("worker")


def start_critical_thread(name: str, run: Callable[[], None]) -> None:
    """Start a thread; if it fails, end the process."""

    def guarded() -> None:
        try:
            run()
        except BaseException:
            log.exception("process.thread_failed thread=%s: a defect; the process is replaced", name)
            os._exit(1)

    threading.Thread(target=guarded, name=name, daemon=True).start()
