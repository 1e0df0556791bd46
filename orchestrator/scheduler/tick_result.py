"""What a transaction has brought about: a value that is filled while it is open, and told to everybody once it stands.

Nothing outside Postgres may be told before the commit. Whatever may fail on its own fills a fresh one, which is merged
if it succeeds (`isolation.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol, Self, TypeVar

import msgspec

from orchestrator.domain.code.activation import Activation, Query
from orchestrator.domain.code.commands import ContinueRun
from orchestrator.domain.code.history import Outcome
from orchestrator.domain.flow.definition import is_node
from orchestrator.domain.runs.changes import TurnTaskEnd
from orchestrator.domain.states import IN_FLIGHT_STATES, TaskState
from orchestrator.domain.tasks.callbacks import Callbacks, after_end, after_success
from orchestrator.domain.tasks.task import KeyHolder, NewTask, TaskError
from orchestrator.scheduler.fleet.capabilities import Crowd
from orchestrator.store.code.turns import Unshown
from orchestrator.store.runs.transitions import RunRow
from orchestrator.store.tasks.claims import Claimed
from orchestrator.store.tasks.transitions import Moved
from orchestrator.transport.codec import Attempt, Ended
from orchestrator.transport.quarantine import Refused

T = TypeVar("T")


class Paged(NamedTuple):
    """A claimed activation whose events are too many for one message."""

    task: Claimed
    activation: Activation
    """Without the events."""
    unshown: Unshown


class _Mergeable(msgspec.Struct):
    """Fields that grow. Every tick makes all of them, which takes dataclasses three times as long."""

    def merge(self, other: Self) -> None:
        """Add what another one has."""
        for name in self.__struct_fields__:
            mine, more = getattr(self, name), getattr(other, name)
            if isinstance(mine, _Mergeable):
                mine.merge(more)
            elif isinstance(mine, list):
                mine.extend(more)
            elif isinstance(mine, dict):
                mine.update(more)  # which adds the numbers of counters
            elif isinstance(mine, bool):
                setattr(self, name, mine or more)
            elif isinstance(mine, int):
                setattr(self, name, mine + more)
            elif more is not None:  # an empty value is one too
                setattr(self, name, more)


class TickTasks(_Mergeable):
    """Tasks that moved, as far as something is still to follow in the same transaction."""

    moved: list[Moved] = []
    """Tasks whose state changed and whose runs have not been counted yet."""
    outcomes: dict[bytes, tuple[bytes | None, TaskError | None]] = {}
    """Results and errors of tasks that ended in a run, for its code to be told if it has any."""
    results: dict[tuple[bytes, str], bytes] = {}
    """By run and step, the result of the last task of it that has ended well: steps below may read it."""
    follow_ups: list[NewTask] = []
    """Tasks that were asked for when others end."""
    keys: list[tuple[str, bytes]] = []
    """Unique keys of tasks that ended, and those tasks."""


class TickRuns(_Mergeable):
    """Runs to be told or ended in the same transaction."""

    children: list[tuple[bytes, str, str | Outcome]] = []
    """Child runs that ended: parent, state, and its step, or what its code learns."""
    turn_task_ends: list[TurnTaskEnd] = []
    """Turn tasks that ended, and whose runs have not been ended yet."""
    continuing: dict[bytes, ContinueRun] = {}
    """Of those runs, the ones that end to go on in another."""
    unheard: dict[bytes, int] = {}
    """Of those runs, the ones to which more has happened than their code was shown, and the last event that it was."""

    def __bool__(self) -> bool:
        return bool(self.children or self.turn_task_ends)


class Capacity(_Mergeable):
    """What came free, and who turned out not to be of use."""

    landed: Counter[str] = msgspec.field(default_factory=Counter)
    """By queue, how many tasks are no longer in flight."""
    finished: Counter[str] = msgspec.field(default_factory=Counter)
    """By queue, how many tasks a worker finished."""
    left_lanes: list[str] = []
    """Lanes, once for each of their tasks that is no longer in flight."""
    begun: list[tuple[bytes, int]] = []
    """Attempts that are said to have begun."""
    lingering: list[tuple[bytes, int, str]] = []
    """Attempts, with their lanes, that have ended and whose code may still run."""
    turns_over: list[tuple[bytes, int]] = []
    """Activations that are no longer in flight: run and attempt."""
    denied: list[tuple[str, str]] = []
    """Workers that handed a task back because they do not know it, and its name."""
    lacking: list[str] = []
    """Data keys that a worker lacked for a task, which it handed back."""
    crowds: dict[Crowd, bool] = {}
    """Of tasks that only some workers know, whether some are kept back now."""


class WakeUps(_Mergeable):
    """Why the leader has to look again, in this tick or the next."""

    delayed: bool = False
    """A task was given a time at which it is due."""
    handed_back: bool = False
    """A worker has handed a task back, which may have expired meanwhile: then it is not handed out again."""
    has_requests: bool = False
    """The leader has put something into its own inbox, or made something ready that it finds like that."""
    contested: bool = False
    """Something in the inbox must wait for a transaction that has not ended."""
    queues_changed: bool = False
    """Somebody has paused, resumed or limited a queue."""
    runs_to_begin: bool = False
    """Runs came up after the pending work was read: children, those that an event started, unparked ones."""
    runs_to_expand: bool = False
    """Runs have more to start than there was room for. They go on in the next tick, and do not wait for a look."""
    has_advanced: bool = False
    """Runs were counted or planned, and may wait for the leader in some other way now."""


class TickCode(_Mergeable):
    """What the leader remembers of runs of code once this stands."""

    asked: list[tuple[bytes, Query]] = []
    """Runs, and what is asked of their code."""
    passed_on: list[bytes] = []
    """Runs that have ended, and of which others are asked, or those who asked were told."""
    sent: dict[bytes, int] = {}
    """Runs whose code is being asked, and in which attempt."""
    reported: list[bytes] = []
    """Runs whose code need not be asked again what it was sent."""
    freed: tuple[frozenset[str], bytes] | None = None
    """For which workers stuck runs were freed, and up to which run; empty if all were."""


class Outgoing(_Mergeable):
    """What others are told after the commit."""

    claimed: list[Claimed] = []
    """Tasks to push."""
    paged: list[Paged] = []
    """Activations to send page by page."""
    ended: list[Ended] = []
    """Tasks and runs that ended, for waiting clients."""
    revoked: list[Moved] = []
    """Attempts that a worker may still be running and that no longer count."""
    withdrawn: dict[str, list[str]] = {}
    """By queue, messages that nobody is to receive any more."""
    key_holders: dict[bytes, KeyHolder] = {}
    """By the id of a task that a running task wants, which one has its key; for that running task."""
    set_aside: list[Refused] = []
    """Events that could not be applied."""
    moved: list[Moved] = []
    """Tasks that changed their state, turn tasks included, for people who watch."""
    runs: list[RunRow] = []
    """Runs that have begun or ended."""
    counted: list[bytes] = []
    """Runs of which something else has changed."""
    drains: frozenset[bytes] | None = None
    """All workers that somebody wants to end, if another one is among them."""


_LOOKS = 4
"""Of a batch, how many are looked at for their times, at least."""
_queue, _state, _queue_and_state = attrgetter("queue"), attrgetter("state"), attrgetter("queue", "state")


class _Timed(Protocol):
    """An attempt of which it is known how long it ran."""

    @property
    def id(self) -> bytes: ...
    @property
    def duration(self) -> float | None: ...


def sampled(batch: Sequence[T]) -> Iterator[tuple[T, int]]:
    """Yield all of a small batch, or every n-th of a large one, and for how many of it each stands."""
    step = max(1, len(batch) // _LOOKS)
    for place in range(0, len(batch), step):
        yield batch[place], min(step, len(batch) - place)


class Counts(_Mergeable):
    """What is counted for monitoring, once it stands."""

    moved: list[tuple[str, str, int]] = []
    """Queues, states, and how many tasks have come to that."""
    retried: list[str] = []
    """Queues, once for each attempt that failed and is tried again."""
    lost: list[str] = []
    """Queues, once for each attempt that was lost with its worker."""
    ran: list[tuple[str, float, int]] = []
    """Queues, how long an attempt of theirs ran, and for how many it stands."""
    reports: int = 0
    """How many reports were applied."""

    def add(self, moved: Sequence[Moved]) -> None:
        """Take note of tasks that a statement moved: as a rule all in one queue, and to one state."""
        queues, states = set(map(_queue, moved)), set(map(_state, moved))
        if len(queues) == len(states) == 1:
            self.moved.append((queues.pop(), states.pop(), len(moved)))
        else:
            self.moved += [(*place, number) for place, number in Counter(map(_queue_and_state, moved)).items()]

    def time(self, moved: Sequence[Moved], reported: Sequence[_Timed]) -> None:
        """Take note of how long attempts ran; of many, every n-th is looked at, and stands for n."""
        if len(moved) == len(reported) and len(queues := set(map(_queue, moved))) == 1:  # then nobody is looked for
            queue = queues.pop()
            self.ran += [(queue, row.duration, times) for row, times in sampled(reported) if row.duration is not None]
        elif moved:
            wanted = {task.id: (task.queue, times) for task, times in sampled(moved)}
            for row in reported:
                if row.id in wanted and row.duration is not None:
                    queue, times = wanted[row.id]
                    self.ran.append((queue, row.duration, times))


class TickResult(_Mergeable):
    """All that one transaction, or a part of it, has brought about."""

    tasks: TickTasks = msgspec.field(default_factory=TickTasks)
    runs: TickRuns = msgspec.field(default_factory=TickRuns)
    capacity: Capacity = msgspec.field(default_factory=Capacity)
    wakeups: WakeUps = msgspec.field(default_factory=WakeUps)
    code: TickCode = msgspec.field(default_factory=TickCode)
    outgoing: Outgoing = msgspec.field(default_factory=Outgoing)
    counts: Counts = msgspec.field(default_factory=Counts)
    failed_parts: list[str] = []
    """What a careful tick could not do, and nobody in particular is at fault."""

    def note(
        self,
        moved: Sequence[Moved],
        *,
        results: Mapping[bytes, bytes] | None = None,
        errors: Mapping[bytes, TaskError] | None = None,
        by_worker: bool = False,
        inline_result: int = 0,
        lingering: Container[bytes] = (),
    ) -> None:
        """Take note of tasks that a statement moved; small results of those that ended go to waiting clients.

        `lingering` are tasks whose code may still run although their attempts have ended.
        """
        tasks, capacity, ended = self.tasks, self.capacity, self.outgoing.ended
        self.counts.add(moved)
        self.outgoing.moved.extend(moved)
        landed: list[str] = []
        for task in moved:
            is_turn_task = task.run_id is not None and task.is_turn_task
            if task.before in IN_FLIGHT_STATES:
                landed.append(task.queue)
                if is_turn_task:
                    capacity.turns_over.append((task.id, task.attempt))
                if task.lane is not None:
                    if task.id in lingering:
                        capacity.lingering.append((task.id, task.attempt, task.lane))
                    else:
                        capacity.left_lanes.append(task.lane)
            if task.run_id is not None and not is_turn_task:
                tasks.moved.append(task)
            if task.state == "pending":
                if task.lane is not None:
                    self.wakeups.has_requests = True
                continue
            if task.unique_key is not None:
                tasks.keys.append((task.unique_key, task.id))
            result = results.get(task.id) if results else None
            error = errors.get(task.id) if errors else None
            inline = result if result is not None and len(result) <= inline_result else None
            if is_turn_task:  # who waits for it waits for the run
                self.runs.turn_task_ends.append(TurnTaskEnd(task.id, task.state, result, error, inline))
                continue
            if task.run_id is not None and (task.step is None or is_node(task.step)):
                tasks.outcomes[task.id] = result, error
            elif task.run_id is not None and task.step is not None and result is not None:
                tasks.results[task.run_id, task.step] = result
            if task.callbacks is not None:
                tasks.follow_ups.extend(_follow_ups(task, result, error))
            ended.append(Ended(task.id, task.state, inline, error))
        capacity.landed.update(landed)
        if by_worker:
            capacity.finished.update(landed)

    def over(self) -> Iterator[bytes]:
        """Yield tasks that ended, and runs of code whose turns did."""
        yield from (ended.id for ended in self.outgoing.ended)
        yield from (run for run, _ in self.capacity.turns_over)

    def sent(self) -> Sequence[Claimed]:
        """Return the tasks that it has claimed, however they are sent."""
        paged = self.outgoing.paged
        return [*self.outgoing.claimed, *(one.task for one in paged)] if paged else self.outgoing.claimed

    def last_claimed(self) -> Attempt | None:
        """Return one of the attempts that it has claimed, if any."""
        sent = self.sent()
        return Attempt(sent[-1].id, sent[-1].attempt) if sent else None


def _follow_ups(task: Moved, result: bytes | None, error: TaskError | None) -> Iterable[NewTask]:
    callbacks = msgspec.convert(task.callbacks, Callbacks)
    if task.state == TaskState.SUCCESS:
        return after_success(task.id, task.attempt, callbacks, result, task.trace)
    if task.state == TaskState.FAILED:
        return after_end(task.id, task.attempt, callbacks, error, task.trace)
    return ()
