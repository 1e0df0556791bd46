"""What a transaction has brought about: a value that is filled while it is open, and published after the commit.

Nothing outside Postgres may hear of it before. A part of a tick that may fail on its own fills a result of its own,
which is merged if the part succeeds (`transaction.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from operator import add, attrgetter, iadd, ior, or_
from typing import Any, NamedTuple, Protocol, Self

import msgspec

from orchestrator.domain.code.activation import Activation, Query
from orchestrator.domain.code.commands import ContinueRun
from orchestrator.domain.code.ends import task_outcome
from orchestrator.domain.code.history import Fact, Outcome
from orchestrator.domain.flow.definition import is_node
from orchestrator.domain.runs import RunChanges, TurnTaskEnd
from orchestrator.domain.states import ENDED_TASK_STATES, IN_FLIGHT_STATES, TaskState
from orchestrator.domain.tasks.callbacks import Callbacks, after_end, after_success
from orchestrator.domain.tasks.task import KeyHolder, NewTask, Succeeded, TaskError
from orchestrator.scheduler.fleet.capabilities import CapacityHold
from orchestrator.store.code.turns import Unshown
from orchestrator.store.runs.transitions import RunRow
from orchestrator.store.tasks.claims import Claimed
from orchestrator.store.tasks.transitions import Moved
from orchestrator.transport.codec import Ended
from orchestrator.transport.quarantine import Refused


class Paged(NamedTuple):
    """A claimed activation whose events are too many for one message."""

    task: Claimed
    activation: Activation
    """Without the events."""
    unshown: Unshown


class ChangesByRun(dict[bytes, RunChanges]):
    """The changes of each run, combined."""

    def __missing__(self, run: bytes) -> RunChanges:
        changes = RunChanges(defaultdict(int), ended=defaultdict(int), reopened=defaultdict(int), facts=[])
        self[run] = changes
        return changes

    def __ior__(self, other: Mapping[bytes, RunChanges]) -> Self:  # type: ignore[override,misc]
        for run, changes in other.items():
            self[run].add(changes)
        return self


_MERGE: dict[type, Callable[[Any, Any], Any]] = {
    list: iadd,
    dict: ior,
    ChangesByRun: ior,
    Counter: iadd,
    int: add,
    bool: or_,
}
"""How a field takes over what a part has, by its type; of all other types, the latest value that is not None counts."""


class _Mergeable(msgspec.Struct):
    """Fields that grow. Every tick makes all of them, which takes dataclasses three times as long."""

    def merge(self, other: Self) -> None:
        """Add what another one has."""
        for name in self.__struct_fields__:
            mine, more = getattr(self, name), getattr(other, name)
            if isinstance(mine, _Mergeable):
                mine.merge(more)
            elif more is not None:  # an empty value is one too
                rule = _MERGE.get(type(mine))
                setattr(self, name, more if rule is None else rule(mine, more))


class Wakeups(_Mergeable):
    """Why the leader has to look again, in this tick or the next."""

    delayed: bool = False
    """A task was given a time at which it is due."""
    handed_back: bool = False
    """A worker has handed a task back, which may have expired meanwhile: then it is not handed out again."""
    requests: bool = False
    """The leader has put something into its own inbox, or made something ready that it finds like that."""
    contested: bool = False
    """Something in the inbox must wait for a transaction that has not ended."""
    queues_changed: bool = False
    """A queue was paused, resumed or limited."""
    runs_to_begin: bool = False
    """Runs came up after the pending work was read: children, those that an event started, unparked ones."""
    runs_to_expand: bool = False
    """Runs have more to start than there was room for. They go on in the next tick, and do not wait for a look."""
    advanced: bool = False
    """Runs were counted or planned, and may wait for the leader in some other way now."""


class TickTasks(_Mergeable):
    """Tasks that moved, as far as something is still to follow in the same transaction."""

    results: dict[tuple[bytes, str], bytes] = {}
    """By run and step, the result of the last task of it that has ended well: steps below may read it."""
    follow_ups: list[NewTask] = []
    """Tasks that were asked for when others end."""
    keys: list[tuple[str, bytes]] = []
    """Unique keys of tasks that ended, and those tasks."""
    foreseen: list[Moved] = []
    """Tasks that were created as claimed, as they are once they have succeeded."""


class TickRuns(_Mergeable):
    """Runs to be notified or ended in the same transaction."""

    changes: ChangesByRun = msgspec.field(default_factory=ChangesByRun)
    """Changes of their tasks and child runs that are pending."""
    turn_task_ends: list[TurnTaskEnd] = []
    """Turn tasks that ended, and whose runs have not been ended yet."""
    continuing: dict[bytes, ContinueRun] = {}
    """Of those runs, the ones that end to go on in another."""
    unheard: dict[bytes, int] = {}
    """Of those runs, the ones to which more has happened than their code was shown, and the last event that it was."""

    def __bool__(self) -> bool:
        return bool(self.changes or self.turn_task_ends)

    def child_ended(self, parent: bytes, state: str, of: str | Outcome) -> None:
        """Take note of a child run that ended: of a step of its parent, or with what its parent's code learns."""
        changes = self.changes[parent]
        changes.count_end(state)
        if isinstance(of, str):
            changes.ended[of, state] += 1
        else:
            changes.facts.append(of)

    def flow_learns(self, run: bytes, *facts: Fact) -> None:
        """Take note of what happened to a flow beside its tasks."""
        changes = self.changes[run]
        changes.facts += facts
        changes.of_flow = True


class Capacity(_Mergeable):
    """Capacity that became free, and workers that lack something."""

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
    holds: dict[CapacityHold, bool] = {}
    """For tasks that only some workers know: whether some are held now."""


class TickCode(_Mergeable):
    """What the leader remembers of runs of code once this stands."""

    asked: list[tuple[bytes, Query]] = []
    """Runs, and what is asked of their code."""
    passed_on: list[bytes] = []
    """Ended runs whose queries were passed on or answered."""
    sent: dict[bytes, int] = {}
    """Runs with a query in flight, and its attempt."""
    reported: list[bytes] = []
    """Runs whose queries need not be sent again."""
    near: dict[bytes, str] = {}
    """Tasks that code waits for and for nothing else, and the worker that has the code: they had better run there."""
    freed: tuple[frozenset[bytes], bytes] | None = None
    """For which workers stuck runs were freed, and up to which run; empty if all were."""
    tried: tuple[frozenset[str], float] | None = None
    """Digests of the code that runs whose processes died were tried with, and when there is another look at them."""
    looked_to: tuple[str, bytes] | None = None
    """Up to which wait runs were told of ends that a leader before did not look for."""


class Outgoing(_Mergeable):
    """Messages to publish after the commit."""

    claimed: list[Claimed] = []
    """Tasks to push."""
    paged: list[Paged] = []
    """Those of them that are activations which go page by page."""
    replays: list[Claimed] = []
    """Queries of ended runs, for which there is no task."""
    ended: list[Ended] = []
    """Tasks and runs that ended, for waiting clients."""
    revoked: list[Moved] = []
    """Attempts that a worker may still be running and that no longer count."""
    withdrawn: dict[str, list[str]] = {}
    """By queue, messages that must not be received any more."""
    key_holders: dict[bytes, KeyHolder] = {}
    """By the id of a task that a running task wants, which one has its key; for that running task."""
    set_aside: list[Refused] = []
    """Events that could not be applied."""
    moved: list[Moved] = []
    """Tasks that changed their state, turn tasks included, for live events."""
    runs: list[RunRow] = []
    """Runs that have begun or ended."""
    counted: list[bytes] = []
    """Runs of which something else has changed."""
    drains: frozenset[bytes] | None = None
    """All workers that are ordered to drain, if another one is among them."""


_LOOKS = 4
"""Of a batch, how many are looked at for their times, at least."""
_queue, _state, _queue_and_state = attrgetter("queue"), attrgetter("state"), attrgetter("queue", "state")


class _Timed(Protocol):
    """An attempt of which it is known how long it ran."""

    @property
    def id(self) -> bytes: ...
    @property
    def duration(self) -> float | None: ...


def sampled(number: int) -> Iterator[tuple[int, int]]:
    """Yield all places of a small batch, or every n-th of a large one, and for how many of it each stands."""
    step = max(1, number // _LOOKS)
    for place in range(0, number, step):
        yield place, min(step, number - place)


class Counts(_Mergeable):
    """Counts for monitoring, valid once it commits."""

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
        if len(moved) == len(reported) and len(queues := set(map(_queue, moved))) == 1:  # then none is looked up
            queue = queues.pop()
            for place, times in sampled(len(reported)):
                if (seconds := reported[place].duration) is not None:
                    self.ran.append((queue, seconds, times))
        elif moved:
            wanted = {moved[place].id: (moved[place].queue, times) for place, times in sampled(len(moved))}
            for row in reported:
                if row.id in wanted and row.duration is not None:
                    queue, times = wanted[row.id]
                    self.ran.append((queue, row.duration, times))


class TickResult(_Mergeable):
    """All that one transaction, or a part of it, has brought about."""

    tasks: TickTasks = msgspec.field(default_factory=TickTasks)
    runs: TickRuns = msgspec.field(default_factory=TickRuns)
    capacity: Capacity = msgspec.field(default_factory=Capacity)
    wake: Wakeups = msgspec.field(default_factory=Wakeups)
    code: TickCode = msgspec.field(default_factory=TickCode)
    outgoing: Outgoing = msgspec.field(default_factory=Outgoing)
    counts: Counts = msgspec.field(default_factory=Counts)
    failed_parts: list[str] = []
    """Failures of a bisecting tick without a culprit."""

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
        capacity, ended = self.capacity, self.outgoing.ended
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
            if task.state == "pending":
                self.wake.requests |= task.lane is not None
                if task.run_id is not None and not is_turn_task and task.before in ENDED_TASK_STATES:
                    self.runs.changes[task.run_id].count_reopened(task.step, task.before)
                continue
            if task.unique_key is not None:
                self.tasks.keys.append((task.unique_key, task.id))
            result = results.get(task.id) if results else None
            error = errors.get(task.id) if errors else None
            inline = result if result is not None and len(result) <= inline_result else None
            if is_turn_task:  # clients wait for the run instead
                self.runs.turn_task_ends.append(TurnTaskEnd(task.id, task.state, result, error, inline))
                continue
            if task.run_id is not None:
                self._count_in_run(task.run_id, task, result, error)
            if task.callbacks is not None:
                self.tasks.follow_ups.extend(_follow_ups(task, result, error))
            ended.append(Ended(task.id, task.state, inline, error))
        capacity.landed.update(landed)
        if by_worker:
            capacity.finished.update(landed)

    def note_successes(self, moved: Sequence[Moved], reports: Sequence[Succeeded], inline_result: int) -> list[NewTask]:
        """Take note of tasks that have succeeded; return those that they have asked for on their success."""
        results = {report.id: report.result for report in reports}
        self.note(moved, results=results, by_worker=True, inline_result=inline_result)
        self.counts.time(moved, reports)
        children = {report.id: report.children for report in reports if report.children}
        return [child for task in moved for child in children.get(task.id, ())] if children else []

    def _count_in_run(self, run: bytes, task: Moved, result: bytes | None, error: TaskError | None) -> None:
        """Take note of a task that ended in a run: of a step of its plan, or as something that its code learns."""
        changes = self.runs.changes[run]
        changes.count_end(task.state)
        if task.step is None or is_node(task.step):
            changes.of_flow |= task.step is not None
            changes.facts.append(task_outcome(task.id, task.state, result, error))
            return
        changes.ended[task.step, task.state] += 1
        if result is not None:
            self.tasks.results[run, task.step] = result

    def over(self) -> Iterator[bytes]:
        """Yield tasks that ended, and runs of code whose turns did."""
        yield from (ended.id for ended in self.outgoing.ended)
        yield from (run for run, _ in self.capacity.turns_over)


def _follow_ups(task: Moved, result: bytes | None, error: TaskError | None) -> Iterable[NewTask]:
    callbacks = msgspec.convert(task.callbacks, Callbacks)
    if task.state == TaskState.SUCCESS:
        return after_success(task.id, task.attempt, callbacks, result, task.trace, task.headers)
    if task.state == TaskState.FAILED:
        return after_end(task.id, task.attempt, callbacks, error, task.trace, task.headers)
    return ()


class CommitHooks:
    """Keeps something in memory between ticks."""

    def committed(self, tick: TickResult) -> None:
        """A transaction was committed with this result."""

    def rolled_back(self) -> None:
        """A transaction, or a part of one, was rolled back."""
