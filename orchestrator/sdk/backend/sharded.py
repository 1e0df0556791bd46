"""The same calls for several shards, each with its own leader. Each call goes to the shard that it concerns.

    new tasks and runs          by hash: of the lane (so that one shard keeps its limits and turns), the key, or the id
    calls by id                 to the shard that has the task or run, found with one query
    lists and other reads       to the first shard, which reads views over all shards
    queues, bulk requests       to each shard

Tasks and runs that are started by tasks and runs stay in the shard of these.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial, wraps
from inspect import isgeneratorfunction, signature
from typing import Any, cast
from uuid import UUID
from zlib import crc32

from orchestrator.domain.access import Scope
from orchestrator.domain.limits.lane_limits import gate_of, scoped
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import NotFound
from orchestrator.sdk.backend.connections import Connections
from orchestrator.sdk.backend.part import Shared
from orchestrator.sdk.calls.declaring import Declared, Kind, declared
from orchestrator.sdk.calls.fleet import Drained
from orchestrator.sdk.calls.interface import PARTS
from orchestrator.settings import Settings
from orchestrator.store import inbox, shards
from orchestrator.store.audit import NOTHING_SEEN, Seen
from orchestrator.store.code import keys as run_keys
from orchestrator.store.dag import plans as dags
from orchestrator.store.inbox import RequestKind
from orchestrator.store.tasks import unique

Method = Callable[..., Any]
_CHECK_INTERVAL = 2.0
"""Seconds between two checks whether a shard is closing."""


class ShardedBackend:
    """The backends of all shards as one. Its own connections are those of the first shard."""

    def __init__(self, settings: Settings, make: Callable[[Settings, Any], Any]) -> None:
        """Create the backends with `make`. Later backends share the waiters of the first."""
        first = make(settings, None)
        self._make: Callable[[int], Any] = lambda number: make(settings.of_shard(number), first)
        self.shards = [first, *map(self._make, range(1, settings.shards))]
        self._width, self._next_check = settings.shards, 0.0
        self.connections: Connections = first.connections
        self.waiting = first.waiting
        self.shared: Shared = first.shared

    def __getattr__(self, name: str) -> Any:
        """Return the calls about a subject."""
        if name not in PARTS:
            raise AttributeError(name)
        part = self.__dict__[name] = _Part(self, name)
        return part

    def of(self, number: int) -> Any:
        """Return the backend of a shard. The database may have more shards than this program's settings."""
        while len(self.shards) <= number:
            self.shards.append(self._make(len(self.shards)))
        return self.shards[number]

    @property
    def knows_width(self) -> bool:
        """Whether the number of shards that accept new tasks and runs was read recently."""
        return time.monotonic() < self._next_check

    def place(self, value: bytes | str) -> int:
        """Return the shard for a new task or run, by hash of a value. A closing shard gets none."""
        if not self.knows_width:
            with self.connections.reading() as connection:
                is_closing = [shard.is_closing for shard in shards.list_shards(connection)]
            self._width = max(1, min(len(self.shards), is_closing.count(False)))
            self._next_check = time.monotonic() + _CHECK_INTERVAL
        return crc32(value.encode() if isinstance(value, str) else value) % self._width

    @property
    def each(self) -> list[Connections]:
        return [shard.connections for shard in self.shards]

    def ask_all(self, request: RequestKind, targets: Sequence[bytes], seen: Seen = NOTHING_SEEN) -> set[UUID]:
        """Send one request for several tasks or runs. Return those whose state allows the request."""
        shared = self.by_shard(targets).items()
        return {id for number, ids in shared for id in self.of(number).ask_all(request, ids, seen)}

    def by_shard(self, ids: Iterable[bytes]) -> dict[int, list[bytes]]:
        """Group ids by shard. Unknown ids go to the first shard."""
        ids = list(ids)
        with self.connections.reading() as connection:
            located = shards.locate(connection, ids)
        groups: dict[int, list[bytes]] = {}
        for id in ids:
            groups.setdefault(located.get(id, 0), []).append(id)
        return groups

    def close(self) -> None:
        for shard in self.shards:
            shard.close()


class _Part:
    def __init__(self, backend: ShardedBackend, name: str) -> None:
        self._backend = backend
        self._name = name
        self._declared: Mapping[str, Declared] = declared(name, PARTS[name])

    def __getattr__(self, name: str) -> Any:
        first = getattr(getattr(self._backend.shards[0], self._name), name)
        route = _ROUTES.get(f"{self._name}.{name}") or self._route_by_id(name)
        if route is None or not callable(first):
            return first
        call = _positional(first, partial(route, self._backend, partial(self._of, name)))
        method = _stepwise(call) if isgeneratorfunction(first) or self._waits(name) else wraps(first)(call)
        self.__dict__[name] = method
        return method

    def _of(self, name: str, number: int) -> Method:
        method: Method = getattr(getattr(self._backend.of(number), self._name), name)
        return method

    def _waits(self, name: str) -> bool:
        return name in self._declared and self._declared[name].waits

    def _route_by_id(self, name: str) -> Method | None:
        """Return the route of a call that changes or queries the task or run in one of its arguments; else None."""
        call = self._declared.get(name)
        if call is None or ((call.rules.for_programs or call.rules.scope is Scope.READ) and not call.waits):
            return None
        about = call.rules.about or {}
        argument = about.get(Kind.TASK) or about.get(Kind.RUN)
        return None if argument is None else partial(_by_id, list(call.signature.parameters)[1:].index(argument))


def _positional(method: Method, route: Method) -> Method:
    """Return a call that passes its first arguments to a route by position. The API passes all arguments by name."""
    names = [p.name for p in signature(method).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]

    def call(*args: Any, **kwargs: Any) -> Any:
        for name in names[len(args) :]:
            if name not in kwargs:
                break
            args = (*args, kwargs.pop(name))
        return route(*args, **kwargs)

    return call


def _stepwise(call: Method) -> Method:
    """Return a call that finds its shard in its first step, which may run in another thread than the call."""

    def stepwise(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        return (yield from call(*args, **kwargs))

    return stepwise


# -- routes: each receives the backend, a function that returns the method of a shard, and the arguments


def _by_id(position: int, backend: ShardedBackend, of: Callable[[int], Method], *args: Any, **kwargs: Any) -> Any:
    (number,) = backend.by_shard([args[position]])
    return of(number)(*args, **kwargs)


def _first(backend: ShardedBackend, of: Callable[[int], Method], *args: Any, **kwargs: Any) -> Any:
    del backend
    return of(0)(*args, **kwargs)


def _each(combine: Callable[[list[Any]], Any]) -> Method:
    def call(backend: ShardedBackend, of: Callable[[int], Method], *args: Any, **kwargs: Any) -> Any:
        return combine([of(number)(*args, **kwargs) for number in range(len(backend.shards))])

    return call


def _place_of(backend: ShardedBackend, task: NewTask) -> int:
    """Return the shard of a new task: that of the task with its unique key, or else of its lane, key or id."""
    if task.unique is not None:
        with backend.connections.reading() as connection:
            holder = unique.holder(connection, task.unique.key)
        if holder is not None:
            return next(iter(backend.by_shard([holder])))
    limited = task.lane and (gate_of(task.lane) or task.lane)
    return backend.place(limited or (task.unique and task.unique.key) or task.id)


def _new_task(position: int, backend: ShardedBackend, of: Callable[[int], Method], *args: Any, **kwargs: Any) -> Any:
    return of(_place_of(backend, args[position]))(*args, **kwargs)


def _new_tasks(
    backend: ShardedBackend, of: Callable[[int], Method], tasks: Iterable[NewTask], *args: Any, **kwargs: Any
) -> Any:
    """Create all tasks in one shard, because they share a transaction."""
    tasks = [*tasks]
    return of(_place_of(backend, tasks[0]) if tasks else 0)(tasks, *args, **kwargs)


async def _anew_task(
    backend: ShardedBackend, of: Callable[[int], Method], task: NewTask, *args: Any, **kwargs: Any
) -> Any:
    must_query = task.unique is not None or not backend.knows_width
    number = await asyncio.to_thread(_place_of, backend, task) if must_query else _place_of(backend, task)
    return await of(number)(task, *args, **kwargs)


def _new_run(position: int, backend: ShardedBackend, of: Callable[[int], Method], *args: Any, **kwargs: Any) -> Any:
    """Create a run in the shard by hash of its id or key, or in the shard of the run that has its key."""
    key = kwargs.get("key")
    if key is None:
        return of(backend.place(args[position]))(*args, **kwargs)
    with backend.connections.reading() as connection:
        if position == 0:
            holder = run_keys.holders(connection, [scoped(args[1].workflow, key)]).get(scoped(args[1].workflow, key))
        else:
            holder = dags.by_key(connection, args[0] if isinstance(args[0], str) else args[0][-1].name, key)
    number = backend.place(key) if holder is None else next(iter(backend.by_shard([holder])))
    return of(number)(*args, **kwargs)


def _set_queue(backend: ShardedBackend, of: Callable[[int], Method], *args: Any, **kwargs: Any) -> Any:
    """Store queue settings, which all shards read, and notify each leader."""
    of(0)(*args, **kwargs)
    for connections in backend.each[1:]:
        with connections.changing("the leaders of all shards were notified") as connection:
            inbox.add(connection, RequestKind.QUEUES, bytes(16))


def _signal_many(
    backend: ShardedBackend,
    of: Callable[[int], Method],
    workflow: str,
    name: str,
    signals: Sequence[tuple[bytes, bytes]],
) -> list[bytes]:
    missed: list[bytes] = []
    for number, ids in backend.by_shard(dict(signals)).items():
        missed += of(number)(workflow, name, [signal for signal in signals if signal[0] in ids])
    return missed


def _withdraw(backend: ShardedBackend, of: Callable[[int], Method], tasks: Sequence[bytes]) -> None:
    for number, ids in backend.by_shard(tasks).items():
        of(number)(ids)


def _drain(backend: ShardedBackend, of: Callable[[int], Method], worker: str) -> Drained:
    missing: NotFound | None = None
    for number in range(len(backend.shards)):
        try:
            return cast("Drained", of(number)(worker))
        except NotFound as error:
            missing = error
    raise missing or NotFound(worker)


def _sum(results: list[Any]) -> Any:
    return sum(results[1:], results[0])


_ROUTES: dict[str, Method] = {
    "tasks.enqueue": partial(_new_task, 0),
    "tasks.aenqueue": _anew_task,
    "tasks.aenqueue_foreign": _anew_task,
    "tasks.enqueue_in": partial(_new_task, 1),
    "tasks.enqueue_many": _new_tasks,
    "tasks.enqueue_once": _new_tasks,
    "tasks.enqueue_missing": _new_tasks,
    "tasks.withdraw": _withdraw,
    "tasks.retry_failed": _each(_sum),
    "runs.start": partial(_new_run, 0),
    "workflows.start": partial(_new_run, 2),
    "workflows.compose": partial(_new_run, 2),
    "flows.start": partial(_new_run, 2),
    "code.start": partial(_new_run, 0),
    "code.signal_many": _signal_many,
    "code.known": _each(_sum),
    "code.reached": _first,
    "queues.pause": _set_queue,
    "queues.limit": _set_queue,
    "queues.purge": _each(lambda _: None),
    "quarantine.newest": _each(lambda found: sorted(_sum(found), key=lambda one: one.id, reverse=True)),
    "quarantine.find": _each(lambda found: next((one for one in found if one is not None), None)),
    "quarantine.clear": _each(_sum),
    "fleet.drain": _drain,
}
