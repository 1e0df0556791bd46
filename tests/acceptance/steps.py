"""Plain functions without a decorator. Workers run them by `steps.py:name`, because the tests allow this file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def discover(count: int = 3) -> dict[str, Any]:
    return {"files": [f"file-{number}" for number in range(count)], "count": count, "day": "2026-01-01"}


def echo(**values: Any) -> dict[str, Any]:
    return values


def double(item: Any) -> Any:
    return item * 2


def record(path: str, name: str, seconds: float = 0.0, **_: Any) -> str:
    """Log the start and end of the call."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"begin {name}\n".encode())
        time.sleep(seconds)
        os.write(descriptor, f"end {name}\n".encode())
    finally:
        os.close(descriptor)
    return name


def fail_until(path: str, **_: Any) -> str:
    if not Path(path).exists():
        raise RuntimeError("not yet")
    return "at last"


def wait_for(path: str, started: str | None = None, **_: Any) -> str:
    if started is not None:
        Path(started).touch()
    while not Path(path).exists():
        time.sleep(0.005)
    return "went"


def nothing() -> None:
    pass
