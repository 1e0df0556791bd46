"""The bridge: moves messages into the task queue, follows their tasks, and returns messages that have not started."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from redis.exceptions import RedisError
from sqlalchemy.exc import DataError

from orchestrator.compat.bridge.calls import Calls, NotYet
from orchestrator.compat.bridge.transit import Taken, Transit
from orchestrator.domain.ids import to_text
from orchestrator.domain.sealed import open_error
from orchestrator.domain.states import TaskState
from orchestrator.domain.tasks.task import WITHDRAWN, NewTask
from orchestrator.errors import InvalidTask, OrchestratorError, Unavailable, Uncertain
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.backend.tasks import TaskBackend
from orchestrator.sdk.calls.waits import MISSING
from orchestrator.sdk.ids import new_ids
from orchestrator.sdk.tasks.handle import Handle
from orchestrator.telemetry import Outage, first_line, get_logger
from orchestrator.transport.codec import Ended

if TYPE_CHECKING:
    from orchestrator.compat.bridge.celery import CeleryQueues, Settle  # which needs Celery

log = get_logger("bridge")

_BATCH = 1_000
"""Messages that one transaction enqueues, at most."""
_HEARTBEAT_INTERVAL = 3.0
"""Seconds between two heartbeats of an idle bridge, which also looks for messages of dead bridges."""
_POLL = 0.02
"""Seconds between two polls for messages: no Redis command waits for several lists without popping from one."""
_RECHECK_INTERVAL = 5.0
"""Seconds after which the ends of tasks are looked up, in case an announcement was missed."""
_RECHECK_BATCH = 5_000
_RETRY_PAUSE = 1.0
"""Seconds before a retry while a server is down."""


class Bridge:
    """Moves messages from some queues of Celery."""

    def __init__(self, app: Orchestrator, source: CeleryQueues, transits: Sequence[Transit], calls: Calls) -> None:
        backend = app._client.backend.tasks
        if not isinstance(backend, TaskBackend):
            raise OrchestratorError("A bridge needs the database itself. Run it without ORCHESTRATOR_API_URL.")
        self._source = source
        self._temporary_errors = _temporary_errors(source)
        self._transits = transits
        self._calls = calls
        self._tasks = backend
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._ends = _Ends(app, source, backend, self._stopped, self._wake, self._refusal)
        self._outage = Outage(log, "the bridge's servers", "messages stay where they are")
        self.moved = 0

    def stop(self) -> None:
        """Stop after the current batch. Remaining messages wait for the next bridge."""
        self._stopped.set()
        self._wake.set()
        self._ends.wake()

    def run(self, *, once: bool = False) -> None:
        """Move messages until stopped. With `once`, return when none is left."""
        if not once:
            threading.Thread(target=self._ends.run, daemon=True).start()
        has_begun = False
        while not self._stopped.is_set():
            try:
                if not has_begun:
                    self._begin()
                    has_begun = True
                moved = sum([self._move(transit) for transit in self._transits])
                self._outage.worked()
                if not moved:
                    if once:
                        break
                    self._await_message()
            except self._temporary_errors as error:
                self._outage.failed(first_line(error))
                has_begun = False  # taken messages are on its list, and confirmed ones may be unfollowed
                self._stopped.wait(_RETRY_PAUSE)
        for transit in self._transits:
            transit.retire()

    def _begin(self) -> None:
        for transit in self._transits:
            transit.beat()
            transit.retake_aside()
            transit.reopen_refused()
            self._follow_open(transit)
            while self._enqueue(transit, transit.name, transit.taken_by(transit.name, _BATCH)):
                pass

    def _await_message(self) -> None:
        """Wait until a message arrives, or a heartbeat is due."""
        lists = [key for transit in self._transits for key in transit.lists]
        deadline = time.monotonic() + _HEARTBEAT_INTERVAL
        while not self._wake.wait(_POLL) and time.monotonic() < deadline and not self._source.redis.exists(*lists):
            pass
        self._wake.clear()

    # -- messages in

    def _move(self, transit: Transit) -> int:
        """Take a batch of messages, and those of dead bridges, and enqueue them as tasks. Return how many."""
        moved = 0
        for bridge in transit.beat():
            while messages := transit.taken_by(bridge, _BATCH):
                moved += self._enqueue(transit, bridge, messages)
            if transit.leave(bridge):
                self._follow_open(transit)
        self._source.upkeep()
        return moved + self._enqueue(transit, transit.name, transit.take(sorted(islice(new_ids(), _BATCH))))

    def _enqueue(self, transit: Transit, bridge: str, taken: Sequence[Taken]) -> int:
        """Enqueue messages as tasks."""
        if not taken:
            return 0
        tasks, refused, answered = self.prepare(taken)
        followed = self._create(tasks, refused) | dict(zip(answered, answered, strict=True))
        for entry in taken:
            if reason := refused.get(entry.id):
                name = self._source.name(entry.message)
                log.warning("bridge.put_aside queue=%s message=%s: %s", transit.queue, name, reason)
        transit.confirm(bridge, taken, followed)
        self._ends.follow(transit, followed.items())
        self.moved += len(followed)
        log.debug("bridge.moved queue=%s tasks=%d", transit.queue, len(followed))
        return len(taken)

    def _create(self, tasks: Sequence[NewTask], refused: dict[bytes, str]) -> dict[bytes, bytes]:
        """Create tasks. Return the task of each message. A task that cannot be stored does not affect the others."""
        try:
            return dict(zip((task.id for task in tasks), self._tasks.enqueue_missing(tasks), strict=True))
        except self._temporary_errors:
            raise
        except (OrchestratorError, DataError) as error:
            if len(tasks) == 1:
                refused[tasks[0].id] = first_line(error)
                return {}
            half = len(tasks) // 2
            return self._create(tasks[:half], refused) | self._create(tasks[half:], refused)

    def prepare(self, taken: Iterable[Taken]) -> tuple[list[NewTask], dict[bytes, str], dict[bytes, str]]:
        """Convert messages. Return the tasks, the reasons to put some aside, and the errors to answer callers with.

        Nothing is written. A message answered with an error is open without a task: `_refusal` returns the error.
        """
        tasks: list[NewTask] = []
        refused: dict[bytes, str] = {}
        answered: dict[bytes, str] = {}
        for id, message in taken:
            try:
                tasks.append(msgspec.structs.replace(self._calls.task(self._source.read(message)), id=id))
            except Exception as error:  # noqa: BLE001  # for example, from a function that computes a key
                is_answered = isinstance(error, InvalidTask) and self._source.has_caller(message)
                (answered if is_answered else refused)[id] = str(error) or type(error).__name__
        return tasks, refused, answered

    def _refusal(self, message: bytes) -> InvalidTask | None:
        """Return the error because of which a message cannot become a task, if there is one."""
        try:
            self._calls.task(self._source.read(message))
        except InvalidTask as error:
            return error
        return None

    # -- returning messages

    def give_back(self, timeout: float = 30.0) -> int:
        """Return messages to their queue that were put aside, or whose tasks no worker has received. Return how many.

        No other bridge may run. If this is interrupted, the next bridge returns messages whose tasks were cancelled.
        """
        returned = 0
        for transit in self._transits:
            try:
                returned += self._give_back_aside(transit)
            finally:
                transit.leave(transit.name)
            self._withdraw([id for id, kept in transit.each(transit.open) if kept.task == id], timeout)
            self._follow_open(transit)
        return returned + self._ends.give_back()

    def _give_back_aside(self, transit: Transit) -> int:
        dead = transit.beat()
        if transit.others():
            raise OrchestratorError(
                f"Another bridge of queue {transit.queue} runs, or died within the last ten seconds. Stop it first."
            )
        for bridge in {*dead, transit.name}:
            while self._enqueue(transit, bridge, transit.taken_by(bridge, _BATCH)):
                pass
            transit.leave(bridge)
        aside = [(id, self._source.list_of(transit.queue, kept.message)) for id, kept in transit.each(transit.aside)]
        return sum(transit.give(transit.aside, part) for part in _slices(aside))

    def _withdraw(self, tasks: Sequence[bytes], timeout: float) -> None:
        """Have the leader cancel the tasks that no worker has received, and wait until it has."""
        for part in _slices(tasks):
            self._tasks.withdraw(part)
        deadline = time.monotonic() + timeout
        while not self._tasks.are_withdrawn():
            if time.monotonic() > deadline:
                raise OrchestratorError(
                    f"No scheduler has withdrawn the tasks within {timeout:g} s. Start a scheduler, and run this "
                    "command again."
                )
            time.sleep(0.05)

    def follow_to_the_end(self) -> None:
        """Write back the results of all open tasks, and return when none is left."""
        for transit in self._transits:
            self._follow_open(transit)
        self._ends.run(once=True)

    def _follow_open(self, transit: Transit) -> None:
        self._ends.follow(transit, ((id, kept.task) for id, kept in transit.each(transit.open)))


class _Ends:
    """Follows tasks, and writes their ends to Celery. The followed tasks are stored in Redis, and read at the start."""

    def __init__(
        self,
        app: Orchestrator,
        source: CeleryQueues,
        tasks: TaskBackend,
        stopped: threading.Event,
        has_sent: threading.Event,
        refusal: Callable[[bytes], InvalidTask | None],
    ) -> None:
        self._has_sent = has_sent
        """Set when messages were sent as a follow-up of a task."""
        self._refusal = refusal
        self._client = app._client
        self._source = source
        self._temporary_errors = _temporary_errors(source)
        self._tasks = tasks
        self._stopped = stopped
        self._awaited: dict[bytes, list[tuple[Transit, bytes]]] = {}
        """The messages of each followed task: several if they have the same unique key."""
        self._lock = threading.Lock()
        self._to_check: deque[bytes] = deque()
        self._has_missed = False
        self.given = 0
        """Number of messages returned to their queue."""
        self._wake = threading.Event()
        self._outage = Outage(log, "where results are read or written", "they are written later")

    def wake(self) -> None:
        """Check for ends now."""
        self._wake.set()

    def follow(self, transit: Transit, tasks: Iterable[tuple[bytes, bytes]]) -> None:
        """Follow tasks, given as pairs of message id and task id."""
        new: list[bytes] = []
        with self._lock:
            for id, task in tasks:
                messages = self._awaited.setdefault(task, [])
                if (transit, id) not in messages:
                    messages.append((transit, id))
                    new.append(task)
        self._tasks._waiting.announcements.listen_all(new, self._on_ended)
        self._to_check.extend(new)  # their ends may have been announced before
        self._wake.set()

    def _on_ended(self, ended: Ended | None) -> None:
        if ended is None:
            self._has_missed = True
        else:
            self._to_check.append(ended.id)
        self._wake.set()

    def give_back(self) -> int:
        """Return messages whose tasks the leader cancelled, the oldest to the front of its list. Return how many."""
        previous = self.given
        for ids in _slices(sorted(self._awaited, reverse=True)):
            self._settle(self._tasks.find_ends(ids))
        return self.given - previous

    def run(self, *, once: bool = False) -> None:
        """Write ends back until stopped. With `once`, return when no task is left to follow."""
        recheck_at = time.monotonic() + _RECHECK_INTERVAL
        while not self._stopped.is_set() and not (once and not self._awaited):
            self._wake.wait(max(0.0, recheck_at - time.monotonic()))
            self._wake.clear()
            if self._has_missed or time.monotonic() >= recheck_at:
                recheck_at = time.monotonic() + _RECHECK_INTERVAL
                self._to_check.extend(self._next_to_check(None if self._has_missed else _RECHECK_BATCH))
                self._has_missed = False
            tasks = list(dict.fromkeys(self._pop_checks()))
            try:
                for ids in _slices(tasks):
                    self._settle(self._tasks.find_ends(ids))
                self._outage.worked()
            except self._temporary_errors as error:
                self._outage.failed(first_line(error))
                self._to_check.extend(tasks)
                self._stopped.wait(_RETRY_PAUSE)
                self._wake.set()

    def _next_to_check(self, limit: int | None) -> list[bytes]:
        """Return the tasks that were not checked for the longest time."""
        with self._lock:
            tasks = list(islice(self._awaited, limit))
            for task in tasks:
                self._awaited[task] = self._awaited.pop(task)
        return tasks

    def _pop_checks(self) -> Iterator[bytes]:
        while self._to_check:
            task = self._to_check.popleft()
            if task in self._awaited:
                yield task

    def _settle(self, ends: Sequence[Ended]) -> None:
        by_transit: defaultdict[Transit, dict[bytes, Ended]] = defaultdict(dict)
        for ended in ends:
            for transit, id in self._awaited.get(ended.id, ()):
                by_transit[transit][id] = ended
        postponed: set[bytes] = set()
        for transit, ended_by_id in by_transit.items():
            followed: dict[bytes, Sequence[tuple[str, bytes]]] = {}
            withdrawn: list[tuple[bytes, str]] = []
            for id, message in transit.kept(list(ended_by_id)).items():
                ended = ended_by_id[id]
                if ended.error is not None and ended.error.kind == WITHDRAWN:
                    withdrawn.append((id, self._source.list_of(transit.queue, message)))
                    continue
                try:
                    follow_ups = self._write_back(message, ended, partial(self._follow_up, transit, id))
                except NotYet:
                    postponed.add(ended.id)
                    continue
                if follow_ups is None:
                    transit.refuse(id)
                else:
                    followed[id] = follow_ups
            self._source.flush()
            for id, follow_ups in followed.items():
                if follow_ups:
                    self._follow_up(transit, id, follow_ups)
            transit.settle([id for id, follow_ups in followed.items() if not follow_ups])
            if withdrawn:
                self.given += transit.give(transit.open, sorted(withdrawn, reverse=True))
        ends = [ended for ended in ends if ended.id not in postponed]
        with self._lock:
            for ended in ends:
                self._awaited.pop(ended.id, None)
        for ended in ends:
            self._tasks._waiting.announcements.forget(ended.id, self._on_ended)

    def _follow_up(self, transit: Transit, id: bytes, messages: Sequence[tuple[str, bytes]]) -> None:
        transit.follow_up(id, messages)
        if messages:
            self._has_sent.set()

    def _write_back(self, message: bytes, ended: Ended, settle: Settle) -> Sequence[tuple[str, bytes]] | None:
        """Write the end of a task to Celery. Return follow-up messages, or None for a retry by the next bridge."""
        try:
            if ended.state == TaskState.SUCCESS:
                return self._source.succeed(message, Handle[Any](self._client, ended.id)._value(ended), settle)
            if ended.state == MISSING and (refusal := self._refusal(message)):
                return self._source.refuse(message, refusal, settle)
            if ended.state == MISSING:
                log.warning("bridge.result_gone task=%s: it was deleted before its end was read", to_text(ended.id))
                return ()
            return self._source.fail(message, ended.state, ended.error and open_error(ended.error), settle)
        except NotYet:
            raise
        except self._temporary_errors:
            raise
        except Exception as error:  # noqa: BLE001 - one message must not stop the others
            name = self._source.name(message)
            log.error("bridge.result_refused task=%s message=%s: %r", to_text(ended.id), name, error)
            return None


def _temporary_errors(source: CeleryQueues) -> tuple[type[Exception], ...]:
    """Return the errors that mean a server is temporarily down."""
    return (*source.unreachable, Unavailable, Uncertain, RedisError)


def _slices(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), _BATCH):
        yield items[start : start + _BATCH]
