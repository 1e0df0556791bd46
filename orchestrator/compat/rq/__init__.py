"""RQ's API: `from orchestrator.compat.rq import Queue` in place of `from rq import Queue`.

Jobs are tasks called `module:function`. `orchestrator rq worker --allow shop high default` runs them.
"""

from typing import Any

from orchestrator.compat.rq.application import app
from orchestrator.compat.rq.call import Callback, Repeat, Retry
from orchestrator.compat.rq.job import Job, cancel_job, get_current_job, requeue_job
from orchestrator.compat.rq.queue import Queue

__all__ = ["Callback", "Job", "Queue", "Repeat", "Retry", "app", "cancel_job", "get_current_job", "requeue_job"]

_REFUSED = {
    "Worker": "Run `orchestrator rq worker --allow MODULE QUEUE…` instead.",
    "SimpleWorker": "Run `orchestrator rq worker --allow MODULE QUEUE…` instead; with --burst for tests.",
    "SpawnWorker": "Run `orchestrator rq worker --allow MODULE QUEUE…` instead.",
    "Connection": "Settings say where Postgres and Redis are: leave the block out.",
    "Webhook": "Post from the job, or use the webhook of a workflow.",
    "Group": "Use a composition: orchestrator.group.",
}


def __getattr__(name: str) -> Any:
    if name in _REFUSED:
        raise ImportError(f"rq.{name} is not covered. {_REFUSED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
