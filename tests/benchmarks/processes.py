"""What benchmarks of several processes have in common: an application, and what a process has said and used."""

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
def _stopped_at_the_end() -> Iterator[list[subprocess.Popen[str] | subprocess.Popen[bytes]]]:
    running: list[subprocess.Popen[str] | subprocess.Popen[bytes]] = []
    try:
        yield running
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(60)


def _said(log: Path, pattern: str, process: subprocess.Popen[bytes]) -> list[str]:
    """Wait until a program says something; return what stands in the brackets of the pattern."""
    deadline = time.monotonic() + 60
    while (found := re.findall(pattern, log.read_text())) == []:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{log.name}: {log.read_text()[-2000:]}")
        time.sleep(0.02)
    return found[-1:] if "(" in pattern else []


def _cpu(process: int) -> float:
    """Return the CPU time of a process, its threads and its children, also of those that have gone, in seconds."""
    try:
        threads = list(Path(f"/proc/{process}/task").iterdir())
        used = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
        children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
        gone = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[13:15]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # its parent has what it used
    return used + sum(map(int, gone)) / os.sysconf("SC_CLK_TCK") + sum(map(_cpu, children))


# -- the client
