"""Functions that the Dask workers of tests run."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def double(number: int) -> dict[str, int]:
    return {"doubled": 2 * number}


async def double_later(number: int) -> int:
    return 2 * number


def fail(text: str) -> None:
    raise ValueError(text)


def hold(folder: str) -> str:
    """Append the process id to `ran`, wait for the file `go`, and create `stopped` when interrupted."""
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
    """Print lines to stdout and stderr, while other tasks print in other threads."""
    for line in range(number):
        print(f"{name} {line}", file=sys.stderr if line % 2 else sys.stdout)
        time.sleep(0.001)
    if name == "bad":
        raise ValueError(name)
    return number


def odd() -> object:
    """Return a value that cannot be serialized."""
    return object()
