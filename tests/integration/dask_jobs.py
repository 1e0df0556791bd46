"""What the Dask workers of tests run."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def double(number: int) -> dict[str, int]:
    """Do some work."""
    return {"doubled": 2 * number}


async def double_later(number: int) -> int:
    """Do some work as a coroutine."""
    return 2 * number


def fail(text: str) -> None:
    """Fail."""
    raise ValueError(text)


def hold(folder: str) -> str:
    """Say that it has begun, and in which process; go on when it is let."""
    with Path(folder, "ran").open("a", encoding="utf-8") as marks:
        marks.write(f"{os.getpid()}\n")
    try:
        while not Path(folder, "go").exists():
            time.sleep(0.01)
    except SystemExit:
        Path(folder, "stopped").touch()
        raise
    return "held"


def talk(name: str, number: int) -> int:
    """Print lines, while another does so in another thread."""
    for line in range(number):
        print(f"{name} {line}", file=sys.stderr if line % 2 else sys.stdout)
        time.sleep(0.001)
    if name == "bad":
        raise ValueError(name)
    return number


def odd() -> object:
    """Return what is no plain data."""
    return object()
