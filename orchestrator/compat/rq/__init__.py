"""RQ's API: `from orchestrator.compat.rq import Queue` in place of `from rq import Queue`.

Jobs are tasks named `module:function`. `orchestrator rq worker --allow shop high default` runs them.
"""

import sys
from functools import partial
from types import ModuleType
from typing import Any

from orchestrator.compat.coverage import RQ, refused
from orchestrator.compat.rq.call import Callback, Repeat, Retry
from orchestrator.compat.rq.exceptions import JobTimeoutException
from orchestrator.compat.rq.job import Dependency, Job, Result, cancel_job, get_current_job, requeue_job
from orchestrator.compat.rq.queue import Queue
from orchestrator.compat.rq.values import app

__all__ = ["Callback", "Job", "Queue", "Repeat", "Retry", "app", "cancel_job", "get_current_job", "requeue_job"]


def _refused(module: str, name: str) -> Any:
    if note := refused(RQ.names[module]).get(name):
        raise ImportError(f"{module}.{name} is not covered: {note}.")
    raise AttributeError(f"module {module!r} has no attribute {name!r} here")


def __getattr__(name: str) -> Any:
    return _refused("rq", name)


_SUBMODULES: dict[str, dict[str, Any]] = {
    "rq.command": {"send_stop_job_command": lambda connection, job_id, serializer=None: cancel_job(job_id)},
    "rq.dependency": {"Dependency": Dependency},
    "rq.repeat": {"Repeat": Repeat},
    "rq.results": {"Result": Result},
    "rq.timeouts": {"JobTimeoutException": JobTimeoutException},
}
"""The names that RQ's submodules provide."""

for _name in RQ.names:
    if _name.startswith("rq.") and (_name in _SUBMODULES or _name not in RQ.modules):
        _module = ModuleType(f"orchestrator.compat.{_name}", "A module of RQ: what is here, and what to use instead.")
        vars(_module).update(_SUBMODULES.get(_name, {}), __getattr__=partial(_refused, _name))
        sys.modules[_module.__name__] = globals()[_name.removeprefix("rq.")] = _module
