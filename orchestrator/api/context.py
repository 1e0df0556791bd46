"""State shared by all routes: the backend, caches and redaction; and response types that many routes use."""

from __future__ import annotations

import asyncio
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
from orchestrator.domain.fleet.announced import redacted_among, with_redaction
from orchestrator.domain.redaction import Redaction
from orchestrator.domain.tasks.obstacles import unregistered, workflow_as_task
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


class ApiMetrics:
    """Metrics of requests, labeled by route and never by client input, so that the number of series is bounded."""

    def __init__(self, settings: Settings) -> None:
        self.system = SystemGauges(settings)
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._times: dict[str, Histogram] = {}
        self.in_flight = 0

    def record(self, method: str, route: str, subject: str, status: int, seconds: float) -> None:
        with self._lock:
            self._requests[method, route, status] += 1
            self._times.setdefault(subject, Histogram(SECONDS)).add(seconds)

    def metrics(self) -> Iterator[exposition.Family]:
        yield from own_metrics("api")
        with self._lock:
            requests, times = sorted(self._requests.items()), sorted(self._times.items())
        yield counter(
            "orchestrator_http_requests_total",
            "Answered requests.",
            *(
                ({"method": method, "route": route, "status": str(status)}, number)
                for (method, route, status), number in requests
            ),
        )
        yield histogram(
            "orchestrator_http_request_seconds",
            "Time until the answer, by subject; includes calls that wait for something.",
            *(({"subject": subject}, found) for subject, found in times),
        )
        yield gauge("orchestrator_http_requests_under_way", "Requests in progress.", ({}, self.in_flight))
        yield from self.system.metrics()


_TIMEOUT = 5.0
"""The timeout of the readiness check, in seconds."""


class Readiness:
    """Checks on request whether Postgres is usable. Concurrent requests share one check."""

    def __init__(self, settings: Settings, connections: Connections) -> None:
        self._settings = settings
        self._connections = connections
        self._outage = Outage(get_logger("api"), "Postgres", "this server is not ready")
        self._engine: Engine | None = None
        self._check_task: asyncio.Task[Any] | None = None

    async def find_problem(self) -> str | None:
        """Return what makes the server not ready, `postgres` or `schema`; None if it is ready."""
        if self._check_task is None or self._check_task.done():
            check = anyio.to_thread.run_sync(self._find_reason, limiter=CapacityLimiter(1))
            self._check_task = asyncio.create_task(check)
        try:
            reason: str | None = await asyncio.wait_for(asyncio.shield(self._check_task), _TIMEOUT + 1.0)
        except TimeoutError:
            return "postgres"
        return reason

    def close(self) -> None:
        if self._engine is not None:
            self._engine.dispose()

    def _find_reason(self) -> str | None:
        try:
            self._check()
        except OrchestratorError as error:
            self._outage.failed(first_line(error))
            return "schema" if isinstance(error, SchemaError) else "postgres"
        self._outage.worked()
        return None

    def _check(self) -> None:
        if self._engine is None:
            self._engine = database.probe_engine(self._settings, "orchestrator readiness", _TIMEOUT)
        try:
            with self._engine.connect() as connection:
                database.check_schema(connection)
        except exc.SQLAlchemyError as error:
            raise self._connections.known_error(error, "") or Unavailable(str(error)) from error


_NAMES_TTL = 10.0
"""Seconds for which the names that workers announced are cached."""
_UNKNOWN_NAME_TTL = 1.0
"""Seconds after which the names are read again if a name is not among them."""


class RegisteredNames:
    """Rejects workflows that are enqueued as tasks, and warns of tasks that no live worker has registered."""

    def __init__(self, read: Callable[[], dict[str, str]]) -> None:
        self._read = read
        self._kinds: dict[str, str] = {}
        self._redacted: Mapping[str, tuple[str, ...]] = {}
        self._read_at = float("-inf")
        self._lock = threading.Lock()

    def check(self, names: Iterable[str]) -> list[str]:
        """Return warnings about task names; raise InvalidTask if a name is a workflow's."""
        names = {*names}
        if self._is_due(names):
            self._refresh(names)
        return self._warnings(names)

    async def acheck(self, name: str) -> list[str]:
        """Do the same on the event loop. Only a read of Postgres takes a thread."""
        if self._is_due({name}):
            await anyio.to_thread.run_sync(self._refresh, {name})
        return self._warnings({name})

    def redacted(self, names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
        """Return the redaction patterns of tasks, by task name."""
        if self._is_due(names := {*names}):
            self._refresh(names)
        return self._redacted

    def hiding(self, task: NewTask) -> NewTask:
        """Return a checked task with the redaction patterns that its function declares."""
        options = with_redaction(task.options, self._redacted.get(task.name, ()))
        return task if options == task.options else msgspec.structs.replace(task, options=options)

    def _is_due(self, names: set[str]) -> bool:
        age = time.monotonic() - self._read_at
        return age > _NAMES_TTL or (age > _UNKNOWN_NAME_TTL and any(self._kinds.get(name) != "task" for name in names))

    def _refresh(self, names: set[str]) -> None:
        with self._lock:
            if self._is_due(names):  # false if another request has read them
                kinds = self._read()
                self._kinds, self._redacted, self._read_at = kinds, redacted_among(kinds), time.monotonic()

    def _warnings(self, names: set[str]) -> list[str]:
        for name in sorted(names):
            if problem := workflow_as_task(name, self._kinds.get(name)):
                raise InvalidTask(problem)
        if UNHEARD in self._kinds:
            return []  # no worker has announced its names
        return [unregistered(name) for name in sorted(names) if name not in self._kinds and not _is_resolvable(name)]


def _is_resolvable(name: str) -> bool:
    """Return whether workers find a name without registration: `module:function`, an executor or a built-in task."""
    return ":" in name or name.startswith("orchestrator.")


class PullWaiters:
    """Work of pull executors in Redis, and two threads that notify waiting requests, started by the first one."""

    def __init__(self, connections: Connections) -> None:
        redis, keys = connections.redis, connections.keys
        self.pulls = Pulls(redis, keys)
        self.offers = PullNotifications(redis, keys.pull_offers, one_by_one=True)
        """Wakes one waiter for each offer of work for its services."""
        self.ends = PullNotifications(redis, keys.pull_ends, one_by_one=False)
        """Wakes all requests that wait until the end of an execution is stored in Postgres."""

    def close(self) -> None:
        self.offers.close()
        self.ends.close()


P = ParamSpec("P")
T = TypeVar("T")
PAGE_SIZE = 50
MAX_PAGE_SIZE = 1_000
MAX_INT = 2**31 - 1
"""The largest Postgres integer."""


class Page(msgspec.Struct, Generic[T], frozen=True):
    """A part of the matching items, and a cursor for the rest.

    A page reads some thousand rows. If few of them match, a page may have few or no items, and yet not be the last.
    """

    items: list[T]
    next: UUID | None
    """Pass it as `cursor` to get the next page; null on the last one."""


class Asked(msgspec.Struct, frozen=True):
    """A request that the leader will process: at once, or when there is a leader."""

    id: UUID
    asked: str
    """The requested action."""


class Done(msgspec.Struct, frozen=True):
    """An action that was done."""

    done: str


class Api:
    """The settings, backend, caches and metrics of one API process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.backend = backend_of(settings)
        self._global_patterns = redaction.split_patterns(settings.redact)
        self.replica = Replica(settings, self.backend.connections.reading) if settings.read_database_url else None
        """The read replica for lists and charts; None if there is none."""
        self.redaction = Redaction(self._global_patterns)
        self.metrics = ApiMetrics(settings)
        self.readiness = Readiness(settings, self.backend.connections)
        self.pull_waiters = PerProcess(lambda: PullWaiters(self.backend.connections))
        self.recent = Recent()
        """Cached reads of dashboard pages, shared by viewers."""
        self.outages = Outages(settings, self.backend.insights, self.reading)
        """Finds out why no task can run."""
        self.names = RegisteredNames(partial(self.read, kinds_of_names))
        """Registered task and workflow names, which enqueues check."""
        self.past_minutes = Recent()
        """Cached counts of past minutes, which no action changes."""

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a connection for reads."""
        with self.backend.connections.reading() as connection:
            yield connection

    def read(self, find: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self.reading() as connection:
            return find(connection, *args, **kwargs)

    def read_list(self, find: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a query on the read replica, if there is one. Its result may be slightly stale."""
        if self.replica is None:
            return self.read(find, *args, **kwargs)
        return self.replica.read(lambda connection: find(connection, *args, **kwargs))

    def redaction_of_task(self, task: TaskDetail) -> Redaction:
        """Return the redaction of a task: its own patterns, and those of relatives that it may have values from."""
        own = tuple(task.options.get("redact", ()))
        family = Family([], [], [], [], is_partial=False)
        if task.run_id is not None or task.parent_id is not None:
            family = self.read(insights.family_of, task=task.id, everywhere=bool(self.redaction))
        family.patterns.extend(task.options.get("inherited", ()))
        if own or self.redaction or family.patterns:
            family.relatives.append(Relative((*own, *family.patterns), task.payload, task.result))
        return inherited(family, self._global_patterns, own)

    def redaction_of_workflow(self, name: str) -> Redaction:
        return Redaction((*self._global_patterns, *self.read(insights.patterns_of_workflow, name)))

    def redaction_of_run(self, run: UUID) -> Redaction:
        """Return the redaction of the arguments and results of a run's tasks."""
        family = self.read(insights.family_of, run=run, everywhere=bool(self.redaction))
        return inherited(family, self._global_patterns)

    def close(self) -> None:
        if (pull_waiters := self.pull_waiters.take()) is not None:
            pull_waiters.close()
        if self.replica is not None:
            self.replica.close()
        self.readiness.close()
        self.backend.close()
        self.metrics.system.close()


_ONE_BY_ONE = {"statuses": "status", "tags": "tag", "attributes": "attribute"}
"""Filter fields that may be repeated in a query: `?status=failed&status=cancelled`."""


def view_fields(view: type, *without: str) -> Any:
    """Return a base class for JSON objects with the fields of a view, which may be a tuple."""
    fields = [(name, kind) for name, kind in get_type_hints(view).items() if name not in without]
    return msgspec.defstruct(f"{view.__name__}Fields", fields, frozen=True, kw_only=True)


def filter_fields(kind: Any, *without: str) -> Any:
    """Return a base class for query parameters with the fields of a filter, all optional."""
    fields = [field for field in msgspec.structs.fields(kind) if field.name not in without]
    return msgspec.defstruct(
        f"{kind.__name__}Fields",
        [(field.name, field.type, field.default) for field in fields],
        rename=_ONE_BY_ONE,
        frozen=True,
        forbid_unknown_fields=True,
    )


def build_from(kind: Callable[..., T], source: Any, **more: Any) -> T:
    """Build a structure from the fields that a source object has, and from `more`."""
    names: Any = getattr(kind, "__struct_fields__", None) or getattr(kind, "__dataclass_fields__", ())
    return kind(**{name: getattr(source, name) for name in names if name not in more and hasattr(source, name)} | more)
