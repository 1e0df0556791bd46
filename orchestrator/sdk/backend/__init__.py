"""The client's side of everything that is stored: one part for each thing, on connections that they share.

    backend ─┬─ tasks  runs  workflows  code  schedules  queues  fleet  insights   what a client can do with each
             ├─ waiting                                      subscribe, look, and look again
             ├─ shared                                       one commit for those who come at the same time
             └─ connections                                  Postgres to write and read, Redis to nudge

This is the one package of the SDK that loads the store. A worker process never needs it, and so never pays for
SQLAlchemy and a database driver; and who only enqueues does not pay for what schedules and workflows need.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from orchestrator.sdk.backend.asking import obstacles
from orchestrator.sdk.backend.connections import Connections
from orchestrator.sdk.backend.tasks import TaskBackend
from orchestrator.sdk.backend.waiting import EndWaiters
from orchestrator.sdk.waiting.undisturbed import undisturbed
from orchestrator.settings import Settings

if TYPE_CHECKING:
    from orchestrator.sdk.backend.code import CodeBackend
    from orchestrator.sdk.backend.fleet import FleetBackend
    from orchestrator.sdk.backend.flows import FlowBackend
    from orchestrator.sdk.backend.insights import InsightBackend
    from orchestrator.sdk.backend.quarantine import QuarantineBackend
    from orchestrator.sdk.backend.queues import QueueBackend
    from orchestrator.sdk.backend.runs import RunBackend
    from orchestrator.sdk.backend.schedules import ScheduleBackend
    from orchestrator.sdk.backend.workflows import WorkflowBackend

__all__ = ["Backend"]

T = TypeVar("T")


class _Part(Generic[T]):
    """A part that is loaded when it is first asked for; from then on it is an attribute like any other."""

    def __init__(self, make: Callable[[Backend], T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, backend: Backend, owner: type) -> T:
        made = undisturbed(lambda: self._make(backend))
        found: T = backend.__dict__.setdefault(self._name, made)  # of two threads, both get the same
        return found


class Backend:
    """What an application can do with the things that it has stored. Connections are opened on first use."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.connections = Connections(settings)
        self.waiting = EndWaiters(settings, partial(obstacles, self.connections))
        self.tasks = TaskBackend(self.connections, self.waiting)

    @_Part
    def code(self) -> CodeBackend:
        """Runs of workflows as code."""
        from orchestrator.sdk.backend.code import CodeBackend

        return CodeBackend(self.connections, self.waiting)

    @_Part
    def runs(self) -> RunBackend:
        """Runs of many tasks, and of workflows that are data."""
        from orchestrator.sdk.backend.runs import RunBackend

        return RunBackend(self.connections, self.waiting, self.code)

    @_Part
    def workflows(self) -> WorkflowBackend:
        """Workflows that are data, and their runs."""
        from orchestrator.sdk.backend.workflows import WorkflowBackend

        return WorkflowBackend(self.connections, self._settings.max_payload)

    @_Part
    def flows(self) -> FlowBackend:
        """Flow graphs, and their runs."""
        from orchestrator.sdk.backend.flows import FlowBackend

        return FlowBackend(self.connections, self._settings.max_payload, self._settings.audit_as)

    @_Part
    def schedules(self) -> ScheduleBackend:
        """Schedules and backfills."""
        from orchestrator.sdk.backend.schedules import ScheduleBackend

        return ScheduleBackend(self.connections)

    @_Part
    def queues(self) -> QueueBackend:
        """Queues: their limits, and what waits in them."""
        from orchestrator.sdk.backend.queues import QueueBackend

        return QueueBackend(self.connections)

    @_Part
    def fleet(self) -> FleetBackend:
        """Workers."""
        from orchestrator.sdk.backend.fleet import FleetBackend

        return FleetBackend(self.connections)

    @_Part
    def insights(self) -> InsightBackend:
        """What people see."""
        from orchestrator.sdk.backend.insights import InsightBackend

        return InsightBackend(self.connections.reading, self._settings)

    @_Part
    def quarantine(self) -> QuarantineBackend:
        """Messages that were set aside."""
        from orchestrator.sdk.backend.quarantine import QuarantineBackend

        return QuarantineBackend(self.connections)

    def close(self) -> None:
        """Close every connection."""
        self.tasks.close()
        self.waiting.close()
        self.connections.close()
