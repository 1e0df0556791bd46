"""Tasks with concurrency limits, rates and unique keys."""

from __future__ import annotations

from typing import Final

from orchestrator import Rate, TaskContext
from tests.chaos.real.project.base import app, spend, token, write, written_down

IN_LANE = 2
IN_ALL_LANES = 3
RATE: Final = Rate(24, per=12.0)
"""Rate per customer. The bucket refills more slowly than a leader is replaced, even on a busy machine, so that a leader
that forgot the bucket's state would be detected."""
TOTAL_RATE: Final = Rate(36, per=12.0)
"""Rate of all customers together."""


@app.task(concurrency=IN_LANE, total_concurrency=IN_ALL_LANES, concurrency_key=lambda lane, **_: lane)
def work_in_lane(context: TaskContext, lane: str, seconds: float) -> str:
    write("limit", context.task_id, f"lane:{lane}", IN_LANE)
    write("limit", context.task_id, "lanes", IN_ALL_LANES)
    with written_down(context):
        spend(seconds)
    return token(context)


@app.task(concurrency=1)
def work_and_tidy_up(context: TaskContext, seconds: float, tidying: float) -> str:
    """Take a while to stop after a cancellation; the next task must wait for that."""
    write("limit", context.task_id, "tidying", 1)
    with written_down(context):
        try:
            spend(seconds)
        finally:
            spend(tidying)
    return token(context)


@app.task(unique_key=lambda key, **_: key)
def work_once(context: TaskContext, key: str, seconds: float) -> str:
    write("limit", context.task_id, f"key:{key}", 1)
    with written_down(context):
        spend(seconds)
    return token(context)


@app.task(rate=RATE, total_rate=TOTAL_RATE, concurrency_key=lambda customer: customer)
def work_at_rate(context: TaskContext, customer: str) -> str:
    with written_down(context):
        pass
    return token(context)
