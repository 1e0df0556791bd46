"""The application, and the functions by which its tasks record their executions."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator import Orchestrator, TaskContext
from tests.chaos.real.journal import append

app = Orchestrator()

LOG = "CHAOS_EXECUTION_LOG"
"""Environment variable with the path of the log."""
_SLICE = 0.02


class Unlucky(Exception):
    """Error of a task that is meant to fail."""


@contextmanager
def written_down(context: TaskContext) -> Iterator[None]:
    """Record the start and the end of an execution, however it ends."""
    path = os.environ[LOG]
    attempt = (context.task_id, context.attempt, os.getpgrp(), os.getpid())
    append(path, "begin", *attempt, time.monotonic())
    outcome = "stopped"
    try:
        yield
        outcome = "success"
    except Unlucky:
        outcome = "failed"
        raise
    finally:
        append(path, "end", *attempt, time.monotonic(), outcome)


def token(context: TaskContext) -> str:
    """Return a result that identifies the execution."""
    return f"{context.task_id}/{context.attempt}/{os.getpid()}"


def spend(seconds: float) -> None:
    """Sleep in short slices, so that the worker can interrupt the task."""
    until = time.monotonic() + seconds
    while (remaining := until - time.monotonic()) > 0:
        time.sleep(min(_SLICE, remaining))


def write(*fields: object) -> None:
    """Append a line to the log."""
    append(os.environ[LOG], *fields)
