"""Helpers for benchmarks of several processes: an application, and the output and CPU usage of processes."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
APPLICATION = """
from orchestrator import Orchestrator

app = Orchestrator()


@app.task(name="noop")
def noop(value: int) -> int:
    return 1
"""


@contextmanager
def _stop_afterwards() -> Iterator[list[subprocess.Popen[str] | subprocess.Popen[bytes]]]:
    running: list[subprocess.Popen[str] | subprocess.Popen[bytes]] = []
    try:
        yield running
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(60)


def _wait_for_log(log: Path, pattern: str, process: subprocess.Popen[bytes]) -> list[str]:
    """Wait until a program's log matches a pattern; return the groups of the last match."""
    deadline = time.monotonic() + 60
    while (found := re.findall(pattern, log.read_text())) == []:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{log.name}: {log.read_text()[-2000:]}")
        time.sleep(0.02)
    return found[-1:] if "(" in pattern else []


def _cpu(process: int) -> float:
    """Return the CPU seconds of a process with its threads and children, including ended ones."""
    try:
        threads = list(Path(f"/proc/{process}/task").iterdir())
        used = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
        children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
        ended_children = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[13:15]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # counted by its parent
    return used + sum(map(int, ended_children)) / os.sysconf("SC_CLK_TCK") + sum(map(_cpu, children))


# -- the client
