"""Tasks with callbacks, each of which must run exactly once."""

from __future__ import annotations

import hashlib

from orchestrator import Retry, TaskContext, TaskFailure
from tests.chaos.real.project.base import Unlucky, app, token, write, written_down

RETRIES = 1


@app.task
def follow_success(context: TaskContext, result: str) -> str:
    """Success callback. The result that it receives begins with the task's id."""
    write("follows", result.partition("/")[0], "success", context.task_id)
    with written_down(context):
        pass
    return token(context)


@app.task
def follow_failure(context: TaskContext, failure: TaskFailure) -> str:
    write("follows", failure.task_id, "failed", context.task_id)
    with written_down(context):
        pass
    return token(context)


@app.task(
    on_success=follow_success,
    on_failure=follow_failure,
    retries=Retry(max=RETRIES, backoff="constant", base=0.2),
)
def work_and_be_followed(context: TaskContext) -> str:
    """Fail in every attempt, for half of the task ids."""
    with written_down(context):
        if hashlib.blake2b(context.task_id.bytes).digest()[0] % 2:
            raise Unlucky(f"attempt {context.attempt}")
    return token(context)
