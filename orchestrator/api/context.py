"""The parts that routes share: the backend, caches and redaction; and types that many answers have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Concatenate, Generic, ParamSpec, TypeVar
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator.api.inherited import inherited
from orchestrator.api.known_names import KnownNames
from orchestrator.api.observed import ObservedApi
from orchestrator.api.pull_waiters import PullWaiters
from orchestrator.api.readiness import Readiness
from orchestrator.api.recent import Recent
from orchestrator.domain import redaction
from orchestrator.domain.redaction import Redaction
from orchestrator.sdk.backend import backend_of
from orchestrator.sdk.backend.replica import Replica
from orchestrator.sdk.waiting.per_process import PerProcess
from orchestrator.settings import Settings
from orchestrator.store import insights
from orchestrator.store.insights import TaskDetail
from orchestrator.store.insights.lookup import kinds_of_names
from orchestrator.store.insights.redact import Family, Relative

P = ParamSpec("P")
T = TypeVar("T")
PAGE = 50
LARGEST_PAGE = 1_000
LARGEST = 2**31 - 1
"""Of a whole number, as Postgres keeps it."""


class Page(msgspec.Struct, Generic[T], frozen=True):
    """Some of what matches, and where the rest begins.

    A page looks at some thousand rows: of what is rare, it may have few, or none, and yet not be the last.
    """

    items: list[T]
    next: UUID | None
    """Give it as `cursor` to get the next page; null on the last one."""


class Asked(msgspec.Struct, frozen=True):
    """Something that the leader will do: at once, or when there is one."""

    id: UUID
    asked: str
    """The request."""


class Done(msgspec.Struct, frozen=True):
    """Something that has been done."""

    done: str


class Api:
    """The client's side of everything that is stored, and a connection to look at it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.backend = backend_of(settings)
        self._everywhere = redaction.words(settings.redact)
        self.replica = Replica(settings, self.backend.connections.reading) if settings.read_database_url else None
        """A standby for lists and charts."""
        self.redaction = Redaction(self._everywhere)
        """Redaction by the settings."""
        self.observed = ObservedApi(settings)
        self.readiness = Readiness(settings, self.backend.connections)
        self.pull_waiters = PerProcess(lambda: PullWaiters(self.backend.connections))
        self.recent = Recent()
        """Reads of pages, shared by many viewers."""
        self.names = KnownNames(partial(self.read, kinds_of_names))
        """Registered names, for enqueues."""
        self.past = Recent()
        """Minutes that are over, counted. No action changes them."""

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a connection to look at something."""
        with self.backend.connections.reading() as connection:
            yield connection

    def read(self, find: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a query on a connection of its own."""
        with self.reading() as connection:
            return find(connection, *args, **kwargs)

    def read_list(self, find: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a query whose answer may be a little old: from the read replica, if there is one."""
        if self.replica is None:
            return self.read(find, *args, **kwargs)
        return self.replica.read(lambda connection: find(connection, *args, **kwargs))

    def redaction_of_task(self, task: TaskDetail) -> Redaction:
        """Return what is not shown of a task: what it names itself, and what those do that it may have values from."""
        own = tuple(task.options.get("redact", ()))
        family = Family([], [], [], [], is_partial=False)
        if task.run_id is not None or task.parent_id is not None:
            family = self.read(insights.family_of, task=task.id, everywhere=bool(self.redaction))
        family.patterns.extend(task.options.get("inherited", ()))
        if own or self.redaction or family.patterns:
            family.relatives.append(Relative((*own, *family.patterns), task.payload, task.result))
        return inherited(family, self._everywhere, own)

    def redaction_of_workflow(self, name: str) -> Redaction:
        """Return what is not shown of the parameters of a workflow."""
        return Redaction((*self._everywhere, *self.read(insights.patterns_of_workflow, name)))

    def redaction_of_run(self, run: UUID) -> Redaction:
        """Return what is not shown of what a run's tasks were given and have returned."""
        family = self.read(insights.family_of, run=run, everywhere=bool(self.redaction))
        return inherited(family, self._everywhere)

    def close(self) -> None:
        """Close every connection."""
        if (pull_waiters := self.pull_waiters.take()) is not None:
            pull_waiters.close()
        if self.replica is not None:
            self.replica.close()
        self.readiness.close()
        self.backend.close()
        self.observed.system.close()
