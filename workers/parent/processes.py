"""Process information of the operating system: memory, processor time of threads, and exit status."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_AMOUNT = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?) ?([KMG]?)(?:i?B)?", re.IGNORECASE)


_CPU_TIME_FIELDS = slice(11, 13)
"""Fields of `/proc/…/stat` with user and system time in ticks, counted after the program's name."""
_HAS_PROC = Path("/proc/self/statm").exists()


def resident_memory(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        if _HAS_PROC:
            return 0
    process = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return int(process.stdout.strip() or 0) * 1024


def cheap_resident_memory(pid: int) -> int:
    """Return the resident memory if reading it is cheap enough for every heartbeat; else 0."""
    return resident_memory(pid) if _HAS_PROC else 0


def parse_memory(text: str) -> int | None:
    """Return the bytes that a text such as `512MB` or `1.5G` means, or None if it is invalid."""
    match = _AMOUNT.fullmatch(text.strip())
    return int(float(match[1]) * _UNITS[match[2].upper()]) if match else None


def format_memory(size: int) -> str:
    """Format a number of bytes in MB."""
    return f"{size / 2**20:.0f} MB"


def thread_time(pid: int, thread: int) -> float:
    """Return the processor time of a thread in seconds; 0.0 if unknown."""
    try:
        stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    ticks = stat.rpartition(")")[2].split()[_CPU_TIME_FIELDS]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


# -- dying with the parent, and describing how a process ended
#
# A process without heartbeats must not continue a task that may run elsewhere by then.

_PR_SET_PDEATHSIG = 1


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent dies. On other systems, a closed pipe must do."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(1)


def describe_exit(code: int) -> str:
    """Describe an exit code as `subprocess` returns it: `exit code 3`, `signal 9 (SIGKILL)`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:  # most real-time signals have no name
        return f"signal {-code}"
