"""What the operating system says of processes: their memory, the time that a thread had, and how they ended."""

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


_USER_AND_SYSTEM = slice(11, 13)
"""Where both times of a thread stand, in ticks, behind the name of the program, which may be anything."""
_HAS_PROC = Path("/proc/self/statm").exists()


def resident_memory(pid: int) -> int:
    """Return the bytes of memory that a process has in RAM; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        if _HAS_PROC:
            return 0
    found = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return int(found.stdout.strip() or 0) * 1024


def noted_memory(pid: int) -> int:
    """Return the same where it costs next to nothing, so that every heartbeat can say it; 0 where it does not."""
    return resident_memory(pid) if _HAS_PROC else 0


def parse_memory(text: str) -> int | None:
    """Return the bytes that a text such as `512MB` or `1.5G` means, or None if it means none."""
    match = _AMOUNT.fullmatch(text.strip())
    return int(float(match[1]) * _UNITS[match[2].upper()]) if match else None


def format_memory(size: int) -> str:
    """Return bytes as people read them."""
    return f"{size / 2**20:.0f} MB"


def thread_time(pid: int, thread: int) -> float:
    """Return the seconds of processor time that a thread of a process has used; 0.0 if unknown."""
    try:
        found = Path(f"/proc/{pid}/task/{thread}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    ticks = found.rpartition(")")[2].split()[_USER_AND_SYSTEM]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


# -- end with the parent, and say of what a process died.
#
# A process without heartbeats must not go on with a task that runs elsewhere by then.

_PR_SET_PDEATHSIG = 1


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies; on other systems, a closed pipe must do."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(1)


def ending(code: int) -> str:
    """Return what a process died of, by its exit code as `subprocess` has it: `exit code 3`, `signal 9 (SIGKILL)`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:  # most of the real-time signals have no name
        return f"signal {-code}"
