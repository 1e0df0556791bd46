"""How long the threads of another process have been given a processor."""

from __future__ import annotations

import os
from pathlib import Path

_USER_AND_SYSTEM = slice(11, 13)
"""Where both times stand, in ticks, behind the name of the program, which may be anything."""


def thread_time(pid: int, thread: int) -> float:
    """Return the seconds of processor time that a thread of a process has used; 0.0 where nobody tells."""
    try:
        found = Path(f"/proc/{pid}/task/{thread}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    ticks = found.rpartition(")")[2].split()[_USER_AND_SYSTEM]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
