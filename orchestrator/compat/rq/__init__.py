"""RQ's API: `from orchestrator.compat.rq import Queue` in place of `from rq import Queue`.

Jobs are tasks called `module:function`. `orchestrator rq worker --allow shop high default` runs them.
"""

from typing import Any

from orchestrator.compat.coverage import RQ, refused
from orchestrator.compat.rq.application import app
from orchestrator.compat.rq.call import Callback, Repeat, Retry
from orchestrator.compat.rq.job import Job, cancel_job, get_current_job, requeue_job
from orchestrator.compat.rq.queue import Queue

__all__ = ["Callback", "Job", "Queue", "Repeat", "Retry", "app", "cancel_job", "get_current_job", "requeue_job"]

_REFUSED = refused(RQ.names["rq"])


def __getattr__(name: str) -> Any:
    if name in _REFUSED:
        raise ImportError(f"rq.{name} is not covered: {_REFUSED[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
