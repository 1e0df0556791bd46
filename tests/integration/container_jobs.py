"""What `orchestrator run-task` runs in tests."""

from __future__ import annotations

import time
from pathlib import Path

from orchestrator import GiveUp, Orchestrator

app = Orchestrator()


@app.task(name="double")
def double(number: int) -> int:
    """Do some work."""
    print("doubling")
    return 2 * number


async def later(number: int) -> int:
    """Do some work as a coroutine."""
    return 3 * number


def hold(folder: str) -> str:
    """Say that it has begun, and go on when it is let; clean up whatever happens."""
    try:
        Path(folder, "begun").touch()
        while not Path(folder, "go").exists():
            time.sleep(0.01)
    finally:
        Path(folder, "cleaned").touch()
    return "held"


def fail(final: bool) -> None:
    """Fail."""
    raise GiveUp("never") if final else ValueError("not now")


def odd() -> object:
    """Return what is no plain data."""
    return object()
