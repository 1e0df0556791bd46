"""The application behind RQ's API: `orchestrator rq worker`, or `--app orchestrator.compat.rq:app`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.sdk.app import Orchestrator

Perform = Callable[[Callable[..., Any], Callable[[str], Any]], Callable[..., Any]]


class RQApplication(Orchestrator):
    """Has no tasks of its own: a worker calls functions of the modules that its operator allows, as RQ does."""

    perform: Perform
    """How a job's function is called; `performing.py` provides it."""

    def _adapted(self, function: Callable[..., Any], find: Callable[[str], Any]) -> Callable[..., Any]:
        return type(self).perform(function, find)


app = RQApplication()
