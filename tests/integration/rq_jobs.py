"""Functions that the RQ workers of tests run."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from rq import get_current_job


def double(number: int, *, note: str = "") -> dict[str, Any]:
    count(note)
    return {"doubled": 2 * number}


def fail(text: str) -> None:
    raise ValueError(text)


def hold(folder: str) -> str:
    """Write the process ids to `pid`, create `began`, and wait for the file `go`."""
    count(folder)
    Path(folder, "pid").write_text(f"{os.getpid()} {os.getppid()}", encoding="utf-8")
    Path(folder, "began").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return "held"


def tell(folder: str) -> str:
    """Report progress, then wait as `hold` does."""
    job = get_current_job()
    assert job is not None
    job.meta["progress"] = {"done": 3, "total": 10, "message": "a third"}
    job.save_meta()  # type: ignore[no-untyped-call]
    return hold(folder)


def talk(number: int) -> int:
    """Print lines and report progress; fail if `number` is 3."""
    for line in range(number):
        print(f"line {line}", file=sys.stderr if line % 2 else sys.stdout)
    job = get_current_job()
    assert job is not None
    job.meta["progress"] = 0.5
    job.save_meta()  # type: ignore[no-untyped-call]
    if number == 3:
        raise ValueError("three")
    return number


async def talk_later(number: int) -> int:
    """Do the same as `talk`, as a coroutine."""
    return talk(number)


def odd() -> object:
    """Return a value that cannot be serialized."""
    return Path("/")


def large(size: int) -> str:
    return "x" * size


def count(folder: str) -> None:
    if folder:
        with Path(folder, "ran").open("a", encoding="utf-8") as marks:
            marks.write("x")
