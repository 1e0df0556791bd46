"""The result of a transaction: filled while the transaction is open, published after the commit.

Nothing outside Postgres may learn of the changes before the commit. A part of a tick that may fail alone fills a
separate result, which is merged if the part succeeds (`transaction.py`).
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
    """The activation without its events."""
    unshown: Unshown


class ChangesByRun(dict[bytes, RunChanges]):
    """The combined changes of each run."""

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
"""How each type of field is merged. For other types, the latest value that is not None wins."""


class _Mergeable(msgspec.Struct):
    """Mergeable fields. A Struct, because every tick makes all of them and dataclasses take three times as long."""

    def merge(self, other: Self) -> None:
        """Merge the fields of another result into this one."""
        for name in self.__struct_fields__:
            mine, more = getattr(self, name), getattr(other, name)
            if isinstance(mine, _Mergeable):
                mine.merge(more)
            elif more is not None:  # an empty value overrides too
                rule = _MERGE.get(type(mine))
                setattr(self, name, more if rule is None else rule(mine, more))


class Wakeups(_Mergeable):
    """Reasons for the leader to look for work again, in this tick or the next."""

    delayed: bool = False
    """A task was given a due time."""
    handed_back: bool = False
    """A worker returned a task. It may have expired meanwhile, and must be checked before the next dispatch."""
    requests: bool = False
    """The leader added to its own inbox, or made work ready that it finds by the same query."""
    contested: bool = False
    """A request in the inbox must wait for an open transaction."""
    queues_changed: bool = False
    """A queue was paused, resumed or limited."""
    runs_to_begin: bool = False
    """Runs to begin appeared after the pending work was read: children, runs started by events, unparked runs."""
    runs_to_expand: bool = False
    """Runs have more tasks to start than there was room for. They continue in the next tick."""
    advanced: bool = False
    """Runs were counted or planned, and may now wait for the leader for another reason."""


class TickTasks(_Mergeable):
    """Tasks that changed state and still have consequences in the same transaction."""

    results: dict[tuple[bytes, str], bytes] = {}
    """The result of the last successful task of each run and step. Later steps may read it."""
    follow_ups: list[NewTask] = []
    """Tasks requested as callbacks of tasks that ended."""
    keys: list[tuple[str, bytes]] = []
    """Unique keys of ended tasks, with the ids of those tasks."""
    foreseen: list[Moved] = []
    """Tasks that were created as claimed, in the state that they have once they succeed."""


class TickRuns(_Mergeable):
    """Runs to notify or end in the same transaction."""

    changes: ChangesByRun = msgspec.field(default_factory=ChangesByRun)
    """Pending changes of runs, from their tasks and child runs."""
    turn_task_ends: list[TurnTaskEnd] = []
    """Turn tasks that ended, and whose runs have not been ended yet."""
    continuing: dict[bytes, ContinueRun] = {}
    """Runs with an ended turn task that continue as a new run."""
    last_seen: dict[bytes, int] = {}
    """Runs with an ended turn task and unseen events, with the last event that their code saw."""

    def __bool__(self) -> bool:
        return bool(self.changes or self.turn_task_ends)

    def child_ended(self, parent: bytes, state: str, of: str | Outcome) -> None:
        """Count a child run that ended: as a step of its parent, or as an event for the parent's code."""
        changes = self.changes[parent]
        changes.count_end(state)
        if isinstance(of, str):
            changes.ended[of, state] += 1
        else:
            changes.facts.append(of)

    def flow_learns(self, run: bytes, *facts: Fact) -> None:
        """Add facts about a flow that do not come from its tasks."""
        changes = self.changes[run]
        changes.facts += facts
        changes.of_flow = True


class Capacity(_Mergeable):
    """Capacity that became free, and data keys, names and places that workers lack."""

    out_of_flight: Counter[str] = msgspec.field(default_factory=Counter)
    """Tasks that left flight, by queue."""
    finished: Counter[str] = msgspec.field(default_factory=Counter)
    """Tasks that a worker finished, by queue."""
    left_lanes: list[str] = []
    """The lane of each task that left flight, repeated once per task."""
    begun: list[tuple[bytes, int]] = []
    """Attempts reported as begun."""
    lingering: list[tuple[bytes, int, str]] = []
    """Attempts, with their lanes, that have ended but whose code may still run."""
    turns_over: list[tuple[bytes, int]] = []
    """Activations that left flight: run and attempt."""
    denied: list[tuple[str, str]] = []
    """Workers that returned a task because they do not know it, with the task's name."""
    resource_holds: list[str] = []
    """Data keys that a worker lacked for a task, which it returned."""
    holds: dict[CapacityHold, bool] = {}
    """Holds on tasks that only some workers know, and whether any such tasks are held now."""


class TickCode(_Mergeable):
    """Changes to the leader's memory of code runs, applied after the commit."""

    queries: list[tuple[bytes, Query]] = []
    """Queries for the code of runs."""
    forwarded: list[bytes] = []
    """Ended runs whose queries were forwarded or answered."""
    sent: dict[bytes, int] = {}
    """Runs with a query in flight, and its attempt."""
    reported: list[bytes] = []
    """Runs whose queries need not be sent again."""
    preferred_workers: dict[bytes, str] = {}
    """Tasks that are the only thing their code waits for, and the worker that holds the code. They should run there."""
    freed_up_to: tuple[frozenset[bytes], bytes] | None = None
    """The workers for which stuck runs were freed, and the last run examined; an empty id means that all were freed."""
    tried_code: tuple[frozenset[str], float] | None = None
    """Digests of the code with which runs of dead processes were tried, and when to look at these runs again."""
    waits_checked_to: tuple[str, bytes] | None = None
    """The last wait examined for ends of runs that the previous leader had not delivered."""


class Outgoing(_Mergeable):
    """Messages to publish after the commit."""

    claimed: list[Claimed] = []
    """Claimed tasks to push."""
    paged: list[Paged] = []
    """Claimed activations that are sent in pages."""
    replays: list[Claimed] = []
    """Queries of ended runs, which have no task."""
    ended: list[Ended] = []
    """Tasks and runs that ended, for waiting clients."""
    revoked: list[Moved] = []
    """Attempts that no longer count, but that a worker may still be running."""
    withdrawn: dict[str, list[str]] = {}
    """Messages that workers must not receive anymore, by queue."""
    key_holders: dict[bytes, KeyHolder] = {}
    """Holders of unique keys, by the id of the task that a running task wants to enqueue. An answer to it."""
    set_aside: list[Refused] = []
    """Events that could not be applied."""
    moved: list[Moved] = []
    """Tasks that changed state, including turn tasks, for live events."""
    runs: list[RunRow] = []
    """Runs that began or ended."""
    counted: list[bytes] = []
    """Runs with other changes."""
    drains: frozenset[bytes] | None = None
    """All workers ordered to drain, if one was added."""


_MIN_SAMPLES = 4
"""Attempts sampled from a batch for their durations, at least."""
_queue, _state, _queue_and_state = attrgetter("queue"), attrgetter("state"), attrgetter("queue", "state")


class _Timed(Protocol):
    """A finished attempt whose duration may be known."""

    @property
    def id(self) -> bytes: ...
    @property
    def duration(self) -> float | None: ...


def sampled(number: int) -> Iterator[tuple[int, int]]:
    """Yield the index of each sampled item of a batch, and how many items the sample stands for."""
    step = max(1, number // _MIN_SAMPLES)
    for place in range(0, number, step):
        yield place, min(step, number - place)


class Counts(_Mergeable):
    """Counts for monitoring, valid after the commit."""

    moved: list[tuple[str, str, int]] = []
    """Queues, states, and the number of tasks that reached the state."""
    retried: list[str] = []
    """The queue of each failed attempt that is retried."""
    lost: list[str] = []
    """The queue of each attempt that was lost with its worker."""
    durations: list[tuple[str, float, int]] = []
    """Queues, the duration of a sampled attempt in seconds, and how many attempts it stands for."""
    reports: int = 0
    """The number of applied reports."""

    def add(self, moved: Sequence[Moved]) -> None:
        """Count tasks that a statement changed. Usually they share one queue and one state."""
        queues, states = set(map(_queue, moved)), set(map(_state, moved))
        if len(queues) == len(states) == 1:
            self.moved.append((queues.pop(), states.pop(), len(moved)))
        else:
            self.moved += [(*place, number) for place, number in Counter(map(_queue_and_state, moved)).items()]

    def time(self, moved: Sequence[Moved], reported: Sequence[_Timed]) -> None:
        """Sample how long attempts ran: of many, every n-th counts n times."""
        if len(moved) == len(reported) and len(queues := set(map(_queue, moved))) == 1:  # no lookup is needed
            queue = queues.pop()
            for place, times in sampled(len(reported)):
                if (seconds := reported[place].duration) is not None:
                    self.durations.append((queue, seconds, times))
        elif moved:
            wanted = {moved[place].id: (moved[place].queue, times) for place, times in sampled(len(moved))}
            for row in reported:
                if row.id in wanted and row.duration is not None:
                    queue, times = wanted[row.id]
                    self.durations.append((queue, row.duration, times))


class TickResult(_Mergeable):
    """The complete result of one transaction, or of a part of it."""

    tasks: TickTasks = msgspec.field(default_factory=TickTasks)
    runs: TickRuns = msgspec.field(default_factory=TickRuns)
    capacity: Capacity = msgspec.field(default_factory=Capacity)
    wake: Wakeups = msgspec.field(default_factory=Wakeups)
    code: TickCode = msgspec.field(default_factory=TickCode)
    outgoing: Outgoing = msgspec.field(default_factory=Outgoing)
    counts: Counts = msgspec.field(default_factory=Counts)
    failed_parts: list[str] = []
    """Errors from a bisecting tick that no single run caused."""

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
        """Record tasks that a statement changed. Small results of ended tasks go to waiting clients.

        `lingering` holds tasks whose code may still run although their attempts have ended.
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
        capacity.out_of_flight.update(landed)
        if by_worker:
            capacity.finished.update(landed)

    def note_successes(self, moved: Sequence[Moved], reports: Sequence[Succeeded], inline_result: int) -> list[NewTask]:
        """Record tasks that succeeded. Return the child tasks that they requested on success."""
        results = {report.id: report.result for report in reports}
        self.note(moved, results=results, by_worker=True, inline_result=inline_result)
        self.counts.time(moved, reports)
        children = {report.id: report.children for report in reports if report.children}
        return [child for task in moved for child in children.get(task.id, ())] if children else []

    def _count_in_run(self, run: bytes, task: Moved, result: bytes | None, error: TaskError | None) -> None:
        """Count an ended task in its run: as a step of the plan, or as an event for the run's code."""
        changes = self.runs.changes[run]
        changes.count_end(task.state)
        if task.step is None or is_node(task.step):
            changes.of_flow |= task.step is not None
            changes.facts.append(task_outcome(task.id, task.state, result, error))
            return
        changes.ended[task.step, task.state] += 1
        if result is not None:
            self.tasks.results[run, task.step] = result

    def ended_ids(self) -> Iterator[bytes]:
        """Yield tasks that ended, and code runs whose turns ended."""
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
    """A part that keeps state in memory between ticks, and follows commits and rollbacks."""

    def committed(self, tick: TickResult) -> None:
        """Update the state after a commit with this result."""

    def rolled_back(self) -> None:
        """Discard state after a rollback of a transaction, or of a part."""
