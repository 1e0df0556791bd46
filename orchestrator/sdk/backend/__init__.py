"""The calls of a client on Postgres and Redis: one part for each subject, with shared connections.

    backend ─┬─ tasks  runs  workflows  code  schedules  queues  fleet  insights   the calls about each subject
             ├─ waiting                                      subscribe to ends, and poll Postgres
             ├─ shared_commits                               one commit for concurrent coroutines
             └─ connections                                  Postgres to write and read, Redis to nudge

Only this package of the SDK imports the store. A worker process never uses it, and so never imports SQLAlchemy and a
database driver. A program that only enqueues does not import the code for schedules and workflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Generic, TypeVar, cast
from uuid import UUID

from orchestrator.sdk.backend.connections import Connections
from orchestrator.sdk.backend.part import Shared, obstacles
from orchestrator.sdk.backend.tasks import TaskBackend
from orchestrator.sdk.backend.waiting import EndWaiters
from orchestrator.sdk.waiting.per_process import signal_safe
from orchestrator.settings import Settings
from orchestrator.store.audit import NOTHING_SEEN, Seen
from orchestrator.store.inbox import RequestKind

if TYPE_CHECKING:
    from orchestrator.sdk.backend.code import CodeBackend
    from orchestrator.sdk.backend.fleet import FleetBackend, QuarantineBackend, QueueBackend
    from orchestrator.sdk.backend.flows import FlowBackend
    from orchestrator.sdk.backend.insights import InsightBackend
    from orchestrator.sdk.backend.runs import RunBackend
    from orchestrator.sdk.backend.schedules import ScheduleBackend
    from orchestrator.sdk.backend.workflows import WorkflowBackend

__all__ = ["Backend", "backend_of"]

T = TypeVar("T")


class _Lazy(Generic[T]):
    """A part whose module is imported on first access. Later accesses find a plain attribute."""

    def __init__(self, kind: str, module: str = "") -> None:
        """Create a descriptor; by default, the module has the name of the part."""
        self._kind = kind
        self._module = module

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, backend: Backend, owner: type) -> T:
        kind = signal_safe(lambda: getattr(import_module(f"{__name__}.{self._module or self._name}"), self._kind))
        part: T = backend.__dict__.setdefault(self._name, kind(backend.shared))  # of two threads, both get the same
        return part


class Backend:
    """The calls of an application on Postgres and Redis. Connections are opened on first use."""

    code: _Lazy[CodeBackend] = _Lazy("CodeBackend")
    runs: _Lazy[RunBackend] = _Lazy("RunBackend")
    workflows: _Lazy[WorkflowBackend] = _Lazy("WorkflowBackend")
    flows: _Lazy[FlowBackend] = _Lazy("FlowBackend")
    schedules: _Lazy[ScheduleBackend] = _Lazy("ScheduleBackend")
    queues: _Lazy[QueueBackend] = _Lazy("QueueBackend", "fleet")
    fleet: _Lazy[FleetBackend] = _Lazy("FleetBackend")
    insights: _Lazy[InsightBackend] = _Lazy("InsightBackend")
    quarantine: _Lazy[QuarantineBackend] = _Lazy("QuarantineBackend", "fleet")

    def __init__(self, settings: Settings, first: Backend | None = None) -> None:
        """Create a backend. The backends of further shards share the waiters of the `first`."""
        self.connections = Connections(settings)
        self.waiting: EndWaiters = (
            first.waiting if first else EndWaiters(settings, partial(obstacles, self.connections))
        )
        self.shared: Shared = Shared(settings, self.connections, self.waiting)
        self.tasks = TaskBackend(self.shared)

    @property
    def each(self) -> list[Connections]:
        return [self.connections]

    def ask_all(self, request: RequestKind, targets: Sequence[bytes], seen: Seen = NOTHING_SEEN) -> set[UUID]:
        """Send one request for several tasks or runs. Return those whose state allows the request."""
        return self.connections.ask_all(request, targets, seen)

    def close(self) -> None:
        self.tasks.close()
        self.waiting.close()
        self.connections.close()


def backend_of(settings: Settings) -> Backend:
    """Return the backend for the servers in the settings."""
    if settings.shards == 1:
        return Backend(settings)
    from orchestrator.sdk.backend.sharded import ShardedBackend  # loads the declarations of all calls

    return cast("Backend", ShardedBackend(settings, Backend))
