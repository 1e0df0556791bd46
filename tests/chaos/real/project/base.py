"""The application, and how its tasks write down what they do."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator import Orchestrator, TaskContext
from tests.chaos.real.journal import append

app = Orchestrator()

LOG = "CHAOS_EXECUTION_LOG"
"""The environment variable that says where to write."""
_SLICE = 0.02


class Unlucky(Exception):
    """What a task raises that is meant to fail."""


@contextmanager
def written_down(context: TaskContext) -> Iterator[None]:
    """Write a line when the task begins and one when it ends, whatever ends it."""
    path = os.environ[LOG]
    who = (context.task_id, context.attempt, os.getpgrp(), os.getpid())
    append(path, "begin", *who, time.monotonic())
    outcome = "stopped"
    try:
        yield
        outcome = "success"
    except Unlucky:
        outcome = "failed"
        raise
    finally:
        append(path, "end", *who, time.monotonic(), outcome)


def token(context: TaskContext) -> str:
    """Return what a success leaves in the database, so that it can be told which execution it came from."""
    return f"{context.task_id}/{context.attempt}/{os.getpid()}"


def spend(seconds: float) -> None:
    """Take this long, in slices, so that an order to stop arrives in between."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(_SLICE, left))


def write(*words: object) -> None:
    """Write a line of one's own."""
    append(os.environ[LOG], *words)
