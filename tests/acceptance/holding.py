"""Tasks that two applications share: they return the id of their process, some after the test lets them end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from project import log, wait_for


def pid() -> int:
    return os.getpid()


def held(started: str, go: str) -> int:
    """Log the process id, then wait for the file `go`."""
    log(started, str(os.getpid()))
    wait_for(go)
    return os.getpid()


async def held_async(started: str, go: str) -> int:
    log(started, str(os.getpid()))
    while not Path(go).exists():
        await asyncio.sleep(0.01)
    return os.getpid()
