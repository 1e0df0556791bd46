"""An application whose tasks are put together: it computes, fails, and keeps a list of what ran in Redis."""

from __future__ import annotations

import os
from typing import Any

from redis import Redis

from orchestrator import Orchestrator, TaskFailure, chain, group

app = Orchestrator()
NOTES = "composed-notes"
"""Where a test says in which list callbacks are noted."""


@app.task
def add(x: int, y: int, z: int = 0) -> int:
    return x + y + z


@app.task
def identity(value: Any) -> Any:
    return value


@app.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task
def add_to_all(numbers: list[int], amount: int) -> list[int]:
    return [number + amount for number in numbers]


@app.task
def pair(value: Any, other: Any) -> list[Any]:
    return [value, other]


@app.task
def fail(value: Any = None) -> None:
    raise ValueError(f"meant to fail, given {value!r}")


@app.task
def note(word: Any, key: str) -> Any:
    """Add a word to a list that tests read."""
    _redis().rpush(key, str(word))
    return word


@app.task
def note_failure(failure: TaskFailure) -> None:
    """Follow a task that failed."""
    _note("failed", failure.kind)


@app.task
def note_success(value: Any) -> None:
    """Follow a task that succeeded."""
    _note("succeeded", value)


@app.task
def add_by_chain(x: int, y: int) -> str:
    """Start a composition from inside a task; return the id of its run."""
    return chain(add.s(x, y), add.s(10)).start().id


@app.task
def add_by_chord(numbers: list[int], amount: int) -> str:
    return chain(group(add.s(number, amount) for number in numbers), total.s()).start().id


def _note(*words: Any) -> None:
    """Add words to the list that a test has named."""
    redis = _redis()
    redis.rpush(str(redis.get(NOTES)), " ".join(map(str, words)))


def _redis() -> Redis:
    return Redis.from_url(os.environ["ORCHESTRATOR_REDIS_URL"], decode_responses=True)
