"""Tasks that two applications have: which process runs them, until they have leave to end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from project import log, wait_for


def pid() -> int:
    return os.getpid()


def held(started: str, go: str) -> int:
    """Say that it started, then wait for leave to end."""
    log(started, str(os.getpid()))
    wait_for(go)
    return os.getpid()


async def held_async(started: str, go: str) -> int:
    log(started, str(os.getpid()))
    while not Path(go).exists():
        await asyncio.sleep(0.01)
    return os.getpid()
