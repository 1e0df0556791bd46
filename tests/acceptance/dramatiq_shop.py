"""Actors written for Dramatiq, with only the import changed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import orchestrator.compat.dramatiq as dramatiq


@dramatiq.actor
def add(one: int, other: int) -> int:
    return one + other


@dramatiq.actor(queue_name="mail", priority=10, time_limit=20_000)
async def text(*words: Any) -> str:
    return " ".join(map(str, words))


@dramatiq.actor(max_retries=3, min_backoff=10, max_backoff=50, throws=KeyError)
def flaky(folder: str, failures: int, kind: str = "OSError") -> int:
    path = Path(folder, "tries")
    with path.open("a") as file:
        file.write("x")
    tries = len(path.read_text())
    if tries <= failures:
        raise {"OSError": OSError, "KeyError": KeyError}[kind](f"try {tries}")
    return tries


@dramatiq.actor
def later(folder: str) -> str:
    path = Path(folder, "later")
    if not path.exists():
        path.touch()
        raise dramatiq.Retry("once more", delay=10)
    return "now"


@dramatiq.actor(max_retries=2, min_backoff=10, max_backoff=10)
def never(folder: str, delay: float | None) -> None:
    with Path(folder, "runs").open("a") as file:
        file.write("x")
    raise dramatiq.Retry("again", delay=delay)


@dramatiq.actor
def touch(path: str) -> None:
    Path(path).touch()


@dramatiq.actor
def hold(folder: str) -> str:
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return "held"
