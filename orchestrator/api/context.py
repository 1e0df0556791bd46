"""The parts that routes share: the backend, caches and redaction; and types that many answers have."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_type_hints
from uuid import UUID

import anyio.to_thread
import msgspec
from anyio import CapacityLimiter
from sqlalchemy import Connection, Engine, exc

from orchestrator.api.inherited import inherited
from orchestrator.api.outages import Outages
from orchestrator.api.recent import Recent
from orchestrator.domain import redaction
from orchestrator.domain.fleet.announced import hiding, redacted_among
from orchestrator.domain.redaction import Redaction
from orchestrator.domain.tasks.obstacles import unregistered, wrong_door
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import InvalidTask, OrchestratorError, SchemaError, Unavailable
from orchestrator.monitoring import exposition
from orchestrator.monitoring.exposition import SECONDS, Histogram, counter, gauge, histogram, own_metrics
from orchestrator.monitoring.system import SystemGauges
from orchestrator.sdk.backend import backend_of
from orchestrator.sdk.backend.connections import Connections
from orchestrator.sdk.backend.replica import Replica
from orchestrator.sdk.waiting.per_process import PerProcess
from orchestrator.settings import Settings
from orchestrator.store import database, insights
from orchestrator.store.insights import TaskDetail
from orchestrator.store.insights.lookup import UNHEARD, kinds_of_names
from orchestrator.store.insights.redact import Family, Relative
from orchestrator.telemetry import Outage, first_line, get_logger
from orchestrator.transport.pull import Pulls
from orchestrator.transport.pull_notifications import PullNotifications


class ObservedApi:
    """Counts requests by route, of which there are only so many, and never by what a client sends."""

    def __init__(self, settings: Settings) -> None:
        self.system = SystemGauges(settings)
        self._lock = threading.Lock()
        self._answered: Counter[tuple[str, str, int]] = Counter()
        self._times: dict[str, Histogram] = {}
        self.under_way = 0

    def answered(self, method: str, route: str, subject: str, status: int, seconds: float) -> None:
        with self._lock:
            self._answered[method, route, status] += 1
            self._times.setdefault(subject, Histogram(SECONDS)).add(seconds)

    def metrics(self) -> Iterator[exposition.Family]:
        yield from own_metrics("api")
        with self._lock:
            answered, times = sorted(self._answered.items()), sorted(self._times.items())
        yield counter(
            "orchestrator_http_requests_total",
            "Requests that were answered.",
            *(
                ({"method": method, "route": route, "status": str(status)}, number)
                for (method, route, status), number in answered
            ),
        )
        yield histogram(
            "orchestrator_http_request_seconds",
            "Time until the answer, by what was asked about; calls that wait for something included.",
            *(({"subject": subject}, found) for subject, found in times),
        )
        yield gauge("orchestrator_http_requests_under_way", "Requests that are worked on.", ({}, self.under_way))
        yield from self.system.metrics()


_LONGEST = 5.0
"""Seconds that Postgres has to answer."""


class Readiness:
    """Looks when it is asked; concurrent questions share one answer."""

    def __init__(self, settings: Settings, connections: Connections) -> None:
        self._settings = settings
        self._connections = connections
        self._outage = Outage(get_logger("api"), "Postgres", "this server is not ready")
        self._engine: Engine | None = None
        self._look: asyncio.Task[Any] | None = None

    async def obstacle(self) -> str | None:
        """Return what is in the way, `postgres` or `schema`; None if nothing is."""
        if self._look is None or self._look.done():
            look = anyio.to_thread.run_sync(self._find_obstacle, limiter=CapacityLimiter(1))
            self._look = asyncio.create_task(look)
        try:
            found: str | None = await asyncio.wait_for(asyncio.shield(self._look), _LONGEST + 1.0)
        except TimeoutError:
            return "postgres"
        return found

    def close(self) -> None:
        if self._engine is not None:
            self._engine.dispose()

    def _find_obstacle(self) -> str | None:
        try:
            self._check()
        except OrchestratorError as error:
            self._outage.failed(first_line(error))
            return "schema" if isinstance(error, SchemaError) else "postgres"
        self._outage.worked()
        return None

    def _check(self) -> None:
        if self._engine is None:
            self._engine = database.probe_engine(self._settings, "orchestrator readiness", _LONGEST)
        try:
            with self._engine.connect() as connection:
                database.check_schema(connection)
        except exc.SQLAlchemyError as error:
            raise self._connections.known(error, "") or Unavailable(str(error)) from error


_FRESH = 10.0
"""Seconds for which a task that is known stays so."""
_AGAIN = 1.0
"""Seconds after which it is read again for a name that is not."""


class KnownNames:
    """Refuses workflows that are enqueued as tasks, and warns of tasks that no live worker has."""

    def __init__(self, read: Callable[[], dict[str, str]]) -> None:
        self._read = read
        self._kinds: dict[str, str] = {}
        self._redacted: Mapping[str, tuple[str, ...]] = {}
        self._at = float("-inf")
        self._lock = threading.Lock()

    def check(self, names: Iterable[str]) -> list[str]:
        """Return warnings about these names; raise InvalidTask if one is a workflow's."""
        names = {*names}
        if self._is_due(names):
            self._refresh(names)
        return self._told(names)

    async def acheck(self, name: str) -> list[str]:
        """Do the same on an event loop, in a thread only where something is to be read."""
        if self._is_due({name}):
            await anyio.to_thread.run_sync(self._refresh, {name})
        return self._told({name})

    def redacted(self, names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
        """Return what tasks do not want shown, by their names."""
        if self._is_due(names := {*names}):
            self._refresh(names)
        return self._redacted

    def hiding(self, task: NewTask) -> NewTask:
        """Return a task that has been checked, which hides what its function does, too."""
        options = hiding(task.options, self._redacted.get(task.name, ()))
        return task if options == task.options else msgspec.structs.replace(task, options=options)

    def _is_due(self, names: set[str]) -> bool:
        age = time.monotonic() - self._at
        return age > _FRESH or (age > _AGAIN and any(self._kinds.get(name) != "task" for name in names))

    def _refresh(self, names: set[str]) -> None:
        with self._lock:
            if self._is_due(names):  # or another request has read it meanwhile
                kinds = self._read()
                self._kinds, self._redacted, self._at = kinds, redacted_among(kinds), time.monotonic()

    def _told(self, names: set[str]) -> list[str]:
        for name in sorted(names):
            if problem := wrong_door(name, self._kinds.get(name)):
                raise InvalidTask(problem)
        if UNHEARD in self._kinds:
            return []  # nobody knows what workers have
        return [unregistered(name) for name in sorted(names) if name not in self._kinds and not _is_found(name)]


def _is_found(name: str) -> bool:
    """Say whether every worker finds it by its name: a function in a file, an executor, or a task of our own."""
    return ":" in name or name.startswith("orchestrator.")


class PullWaiters:
    """Work in Redis, and two threads that hear of it for all requests; the first request that waits begins them."""

    def __init__(self, connections: Connections) -> None:
        redis, keys = connections.redis, connections.keys
        self.pulls = Pulls(redis, keys)
        self.offers = PullNotifications(redis, keys.pull_offers, one_by_one=True)
        """Wakes one waiter for each offer of its services."""
        self.ends = PullNotifications(redis, keys.pull_ends, one_by_one=False)
        """Wakes all requests that wait until the end of an execution is in Postgres."""

    def close(self) -> None:
        self.offers.close()
        self.ends.close()


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
        self.outages = Outages(settings, self.backend.insights, self.reading)
        """Why nothing moves, for pages and listeners."""
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
        return Redaction((*self._everywhere, *self.read(insights.patterns_of_workflow, name)))

    def redaction_of_run(self, run: UUID) -> Redaction:
        """Return what is not shown of what a run's tasks were given and have returned."""
        family = self.read(insights.family_of, run=run, everywhere=bool(self.redaction))
        return inherited(family, self._everywhere)

    def close(self) -> None:
        if (pull_waiters := self.pull_waiters.take()) is not None:
            pull_waiters.close()
        if self.replica is not None:
            self.replica.close()
        self.readiness.close()
        self.backend.close()
        self.observed.system.close()


_ONE_BY_ONE = {"statuses": "status", "tags": "tag", "attributes": "attribute"}
"""Fields that are given once for each value: `?status=failed&status=cancelled`."""


def view_fields(view: type, *without: str) -> Any:
    """Return a base class for answers with the fields of a view; a view may be a tuple, and an answer is an object."""
    fields = [(name, kind) for name, kind in get_type_hints(view).items() if name not in without]
    return msgspec.defstruct(f"{view.__name__}Fields", fields, frozen=True, kw_only=True)


def filter_fields(wanted: Any, *without: str) -> Any:
    """Return a base class for queries with the fields of a filter, of which none must be given."""
    kinds = get_type_hints(wanted, include_extras=True)
    known = dataclasses.fields(wanted) if dataclasses.is_dataclass(wanted) else msgspec.structs.fields(wanted)
    return msgspec.defstruct(
        f"{wanted.__name__}Fields",
        [(one.name, kinds[one.name], one.default) for one in known if one.name not in without],
        rename=_ONE_BY_ONE,
        frozen=True,
        forbid_unknown_fields=True,
    )


def made_from(kind: Callable[..., T], source: Any, **more: Any) -> T:
    """Return a structure with what a source has of its fields, and more."""
    names: Any = getattr(kind, "__struct_fields__", None) or getattr(kind, "__dataclass_fields__", ())
    return kind(**{name: getattr(source, name) for name in names if name not in more and hasattr(source, name)} | more)
