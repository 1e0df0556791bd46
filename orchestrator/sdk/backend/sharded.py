"""The same calls where several leaders share the work: each goes to the shard that it is about.

    new tasks and runs          by hash: of the lane (whose limits and turns are kept in one place), the key, or the id
    by id                       to the shard that has it, which one query finds
    lists, and all that reads   to the first: it reads the views of all
    queues, bulk requests       to each

What tasks and runs start themselves stays in their shard, with the same leader.
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
_LOOK_AGAIN = 2.0
"""Seconds after which it is looked whether a shard is closing."""


class ShardedBackend:
    """Backends of all shards as one. Its own connections are those of the first."""

    def __init__(self, settings: Settings, make: Callable[[Settings, Any], Any]) -> None:
        """`make` makes the backend of one shard; those after the first share what that one has."""
        first = make(settings, None)
        self._make: Callable[[int], Any] = lambda number: make(settings.of_shard(number), first)
        self.shards = [first, *map(self._make, range(1, settings.shards))]
        self._width, self._look_at = settings.shards, 0.0
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
        """Return the backend of a shard; the database may have more than this program knows."""
        while len(self.shards) <= number:
            self.shards.append(self._make(len(self.shards)))
        return self.shards[number]

    @property
    def knows_width(self) -> bool:
        """Say whether it was looked lately how many shards take new tasks and runs."""
        return time.monotonic() < self._look_at

    def place(self, value: bytes | str) -> int:
        """Return the shard for something new: none that is closing."""
        if not self.knows_width:
            with self.connections.reading() as connection:
                is_closing = [one.is_closing for one in shards.list_shards(connection)]
            self._width = max(1, min(len(self.shards), is_closing.count(False)))
            self._look_at = time.monotonic() + _LOOK_AGAIN
        return crc32(value.encode() if isinstance(value, str) else value) % self._width

    @property
    def each(self) -> list[Connections]:
        return [one.connections for one in self.shards]

    def ask_all(self, request: RequestKind, targets: Sequence[bytes], seen: Seen = NOTHING_SEEN) -> set[UUID]:
        """Ask for the same about several tasks or runs; return those that are in a state for it."""
        shared = self.by_shard(targets).items()
        return {id for number, ids in shared for id in self.of(number).ask_all(request, ids, seen)}

    def by_shard(self, ids: Iterable[bytes]) -> dict[int, list[bytes]]:
        """Return ids by their shards; those that are nowhere are the first one's."""
        ids = list(ids)
        with self.connections.reading() as connection:
            found = shards.locate(connection, ids)
        shared: dict[int, list[bytes]] = {}
        for id in ids:
            shared.setdefault(found.get(id, 0), []).append(id)
        return shared

    def close(self) -> None:
        for one in self.shards:
            one.close()


class _Part:
    """The calls about one subject."""

    def __init__(self, backend: ShardedBackend, name: str) -> None:
        self._backend = backend
        self._name = name
        self._declared: Mapping[str, Declared] = declared(name, PARTS[name])

    def __getattr__(self, name: str) -> Any:
        first = getattr(getattr(self._backend.shards[0], self._name), name)
        route = _ROUTES.get(f"{self._name}.{name}") or self._usual(name)
        if route is None or not callable(first):
            return first
        call = _positional(first, partial(route, self._backend, partial(self._of, name)))
        made = _stepwise(call) if isgeneratorfunction(first) or self._waits(name) else wraps(first)(call)
        self.__dict__[name] = made
        return made

    def _of(self, name: str, number: int) -> Method:
        method: Method = getattr(getattr(self._backend.of(number), self._name), name)
        return method

    def _waits(self, name: str) -> bool:
        return name in self._declared and self._declared[name].waits

    def _usual(self, name: str) -> Method | None:
        """Return how a call is routed that changes or asks a task or run, which one of its arguments names."""
        known = self._declared.get(name)
        if known is None or ((known.rules.for_programs or known.rules.scope is Scope.READ) and not known.waits):
            return None
        about = known.rules.about or {}
        argument = about.get(Kind.TASK) or about.get(Kind.RUN)
        return None if argument is None else partial(_by_id, list(known.signature.parameters)[1:].index(argument))


def _positional(method: Method, route: Method) -> Method:
    """Return a call that gives a route the first arguments by position, however they come: the API names them all."""
    names = [one.name for one in signature(method).parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]

    def call(*args: Any, **kwargs: Any) -> Any:
        for name in names[len(args) :]:
            if name not in kwargs:
                break
            args = (*args, kwargs.pop(name))
        return route(*args, **kwargs)

    return call


def _stepwise(call: Method) -> Method:
    """Return a call that looks for its shard with the first step, which may not be taken where it is made."""

    def stepwise(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        return (yield from call(*args, **kwargs))

    return stepwise


# -- routes: each gets the backend, the call of a shard by its number, and the arguments


def _by_id(place: int, backend: ShardedBackend, of: Callable[[int], Method], *args: Any, **kwargs: Any) -> Any:
    (number,) = backend.by_shard([args[place]])
    return of(number)(*args, **kwargs)


def _first(backend: ShardedBackend, of: Callable[[int], Method], *args: Any, **kwargs: Any) -> Any:
    del backend
    return of(0)(*args, **kwargs)


def _each(combine: Callable[[list[Any]], Any]) -> Method:
    def call(backend: ShardedBackend, of: Callable[[int], Method], *args: Any, **kwargs: Any) -> Any:
        return combine([of(number)(*args, **kwargs) for number in range(len(backend.shards))])

    return call


def _place_of(backend: ShardedBackend, task: NewTask) -> int:
    """Return the shard of a new task: that of its lane, or of the task that has its key."""
    if task.unique is not None:
        with backend.connections.reading() as connection:
            holder = unique.holder(connection, task.unique.key)
        if holder is not None:
            return next(iter(backend.by_shard([holder])))
    limited = task.lane and (gate_of(task.lane) or task.lane)
    return backend.place(limited or (task.unique and task.unique.key) or task.id)


def _new_task(at: int, backend: ShardedBackend, of: Callable[[int], Method], *args: Any, **kwargs: Any) -> Any:
    return of(_place_of(backend, args[at]))(*args, **kwargs)


def _new_tasks(
    backend: ShardedBackend, of: Callable[[int], Method], tasks: Iterable[NewTask], *args: Any, **kwargs: Any
) -> Any:
    """Create all of them in one shard, for it is all of them or none."""
    tasks = [*tasks]
    return of(_place_of(backend, tasks[0]) if tasks else 0)(tasks, *args, **kwargs)


async def _anew_task(
    backend: ShardedBackend, of: Callable[[int], Method], task: NewTask, *args: Any, **kwargs: Any
) -> Any:
    is_asking = task.unique is not None or not backend.knows_width
    number = await asyncio.to_thread(_place_of, backend, task) if is_asking else _place_of(backend, task)
    return await of(number)(task, *args, **kwargs)


def _new_run(at: int, backend: ShardedBackend, of: Callable[[int], Method], *args: Any, **kwargs: Any) -> Any:
    """Create a run by the hash of its id or, if it has a key, where the run is that has it."""
    key = kwargs.get("key")
    if key is None:
        return of(backend.place(args[at]))(*args, **kwargs)
    with backend.connections.reading() as connection:
        if at == 0:
            holder = run_keys.holders(connection, [scoped(args[1].workflow, key)]).get(scoped(args[1].workflow, key))
        else:
            holder = dags.by_key(connection, args[0] if isinstance(args[0], str) else args[0][-1].name, key)
    number = backend.place(key) if holder is None else next(iter(backend.by_shard([holder])))
    return of(number)(*args, **kwargs)


def _set_queue(backend: ShardedBackend, of: Callable[[int], Method], *args: Any, **kwargs: Any) -> Any:
    """Store what all shards read, and let each leader read it again."""
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
        missed += of(number)(workflow, name, [one for one in signals if one[0] in ids])
    return missed


def _withdraw(backend: ShardedBackend, of: Callable[[int], Method], tasks: Sequence[bytes]) -> None:
    for number, ids in backend.by_shard(tasks).items():
        of(number)(ids)


def _drain(backend: ShardedBackend, of: Callable[[int], Method], worker: str) -> Drained:
    """Drain the worker where it is; one process of it serves one shard."""
    missing: NotFound | None = None
    for number in range(len(backend.shards)):
        try:
            return cast("Drained", of(number)(worker))
        except NotFound as error:
            missing = error
    raise missing or NotFound(worker)


def _sum(found: list[Any]) -> Any:
    return sum(found[1:], found[0])


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
