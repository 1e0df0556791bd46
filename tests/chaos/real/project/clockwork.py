"""Tasks with schedules; each records its fire time."""

from __future__ import annotations

import hashlib

from orchestrator import TaskContext
from tests.chaos.real.project.base import app, spend, token, write, written_down

DUE = {"due": "${run.fire_time}"}


@app.schedule(every="1s", overlap="allow", catch_up="all", params=DUE)
@app.task(name="beat")
def beat(context: TaskContext, due: str) -> str:
    """Run every second; no fire time may be omitted."""
    return _fired(context, "beat", due)


@app.schedule(every="1s", overlap="skip", catch_up="all", params=DUE)
@app.task(name="turn")
def turn(context: TaskContext, due: str) -> str:
    """Take longer than the interval in half of the runs, so that fires are skipped."""
    return _fired(context, "turn", due, 1.5 if hashlib.blake2b(due.encode()).digest()[0] % 2 else 0.0)


@app.schedule(every="2s", overlap="queue", catch_up="all", params=DUE)
@app.task(name="line")
def line(context: TaskContext, due: str) -> str:
    """Run every two seconds, one run at a time."""
    return _fired(context, "line", due, 0.2)


def _fired(context: TaskContext, schedule: str, due: str, seconds: float = 0.0) -> str:
    write("fire", schedule, due, context.task_id)
    with written_down(context):
        spend(seconds)
    return token(context)
