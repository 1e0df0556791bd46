"""Tasks that tests run with `orchestrator run-task`."""

from __future__ import annotations

import time
from pathlib import Path

from orchestrator import GiveUp, Orchestrator

app = Orchestrator()


@app.task(name="double")
def double(number: int) -> int:
    print("doubling")
    return 2 * number


async def later(number: int) -> int:
    return 3 * number


def hold(folder: str) -> str:
    """Create `begun`, wait for the file `go`, and create `cleaned` in any case."""
    try:
        Path(folder, "begun").touch()
        while not Path(folder, "go").exists():
            time.sleep(0.01)
    finally:
        Path(folder, "cleaned").touch()
    return "held"


def fail(final: bool) -> None:
    raise GiveUp("never") if final else ValueError("not now")


def odd() -> object:
    """Return a value that cannot be serialized."""
    return object()
