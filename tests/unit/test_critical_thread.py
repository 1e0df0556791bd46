"""A worker process ends with any of its critical threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import threading
from orchestrator.workers.running.threads import start_critical_thread

def fail():
    raise LookupError("nothing foresaw this")

start_critical_thread("reporter", fail)
threading.Event().wait()
"""


@pytest.mark.slow
def test_a_process_ends_with_a_critical_thread_and_logs_the_reason() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], timeout=60, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "process.thread_failed thread=reporter" in ended.stderr
    assert "LookupError: nothing foresaw this" in ended.stderr
