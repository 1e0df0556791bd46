"""What one tick gathers while its transaction is open.

Nothing outside Postgres may be told before the commit, so the pieces of a tick leave their news here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.code.activation import Activation
from orchestrator.domain.code.commands import ContinueRun
from orchestrator.domain.code.history import Outcome
from orchestrator.domain.runs.happened import OwnEnd
from orchestrator.domain.states import IN_FLIGHT_STATES, TaskState
from orchestrator.domain.tasks.callbacks import Callbacks, after_end, after_success
from orchestrator.domain.tasks.task import KeyHolder, NewTask, TaskError
from orchestrator.scheduler.budget import Budget
from orchestrator.scheduler.runs.backlog import Backlog
from orchestrator.store.code.turns import Unshown
from orchestrator.store.tasks.transitions import Claimed, Moved
from orchestrator.transport.codec import Attempt, Ended
from orchestrator.transport.quarantine import Refused

if TYPE_CHECKING:
    from orchestrator.scheduler.code.runs import CodeRuns
    from orchestrator.scheduler.dag.plans import Dags
    from orchestrator.scheduler.limits import LaneService
    from orchestrator.scheduler.runs.triggers import Triggers


_NO_NEWS = frozenset({"connection", "now", "dags", "triggers", "lanes", "code", "backlog", "budget"})


class Paged(NamedTuple):
    """A claimed activation whose events are too many for one message."""

    task: Claimed
    activation: Activation
    """Without the events."""
    unshown: Unshown


@dataclass
class Tick:
    """One transaction of the leader, and its news."""

    connection: Connection
    now: datetime
    dags: Dags
    triggers: Triggers
    lanes: LaneService
    code: CodeRuns
    backlog: Backlog = field(default_factory=Backlog)
    budget: Budget = field(default_factory=Budget)
    is_careful: bool = False
    """The tick before this one failed: what belongs to runs is tried, so that the one at fault is found."""
    moved: list[Moved] = field(default_factory=list)
    """Tasks whose state changed and whose runs have not been counted yet."""
    children: list[tuple[bytes, str, str]] = field(default_factory=list)
    """Child runs that ended: parent, its step, and the state."""
    own_ends: list[OwnEnd] = field(default_factory=list)
    """Own tasks that ended, and whose runs have not been ended yet."""
    told: list[tuple[bytes, str, Outcome]] = field(default_factory=list)
    """Child runs of workflows as code that ended: parent, state, and what the parent learns."""
    outcomes: dict[bytes, tuple[bytes | None, TaskError | None]] = field(default_factory=dict)
    """Results and errors of tasks that ended in a run, for its code to be told if it has any."""
    continuing: dict[bytes, ContinueRun] = field(default_factory=dict)
    """Runs that ended to go on in another."""
    resetting: set[bytes] = field(default_factory=set)
    """Runs that end because others repeat them from an earlier event."""
    ended: list[Ended] = field(default_factory=list)
    """Tasks and runs that ended, for waiting clients."""
    landed: Counter[str] = field(default_factory=Counter)
    """By queue, how many tasks are no longer in flight."""
    finished: Counter[str] = field(default_factory=Counter)
    """By queue, how many tasks a worker finished."""
    left_lanes: list[str] = field(default_factory=list)
    """Lanes, once for each of their tasks that is no longer in flight."""
    lingering: list[tuple[bytes, int, str]] = field(default_factory=list)
    """Attempts, with their lanes, that have ended and whose code may still run."""
    keys: list[tuple[str, bytes]] = field(default_factory=list)
    """Unique keys of tasks that ended, and those tasks."""
    key_holders: dict[bytes, KeyHolder] = field(default_factory=dict)
    """By the id of a task that a running task wants, which one has its key; for that running task."""
    follow_ups: list[NewTask] = field(default_factory=list)
    """Tasks that were asked for when others end."""
    delayed: bool = False
    """A task was given a time at which it is due."""
    has_wishes: bool = False
    """The leader has put something into its own inbox."""
    contested: bool = False
    """Something in the inbox must wait for a transaction that has not ended."""
    queues_changed: bool = False
    """Somebody has paused, resumed or limited a queue."""
    runs_to_begin: bool = False
    """Runs have come up since the agenda was read: children, those that an event started, those that are unparked."""
    has_advanced: bool = False
    """Runs were counted or planned, and may wait for the leader in some other way now."""
    claimed: list[Claimed] = field(default_factory=list)
    """Tasks to push after the commit."""
    paged: list[Paged] = field(default_factory=list)
    """Activations to send page by page, from the commit on."""
    turns_over: list[tuple[bytes, int]] = field(default_factory=list)
    """Activations that are no longer in flight: run and attempt."""
    revoked: list[Moved] = field(default_factory=list)
    """Attempts that a worker may still be running and that no longer count."""
    denied: list[tuple[str, str]] = field(default_factory=list)
    """Workers that handed a task back because they do not know it, and its name."""
    set_aside: list[Refused] = field(default_factory=list)
    """Events that could not be applied."""
    failed_parts: list[str] = field(default_factory=list)
    """What a careful tick could not do, and nobody in particular is at fault."""

    def note(
        self,
        moved: Iterable[Moved],
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
        for task in moved:
            if task.before in IN_FLIGHT_STATES:
                self.landed[task.queue] += 1
                if by_worker:
                    self.finished[task.queue] += 1
                if task.is_own:
                    self.turns_over.append((task.id, task.attempt))
                if task.lane is not None:
                    if task.id in lingering:
                        self.lingering.append((task.id, task.attempt, task.lane))
                    else:
                        self.left_lanes.append(task.lane)
            if task.run_id is not None and not task.is_own:
                self.moved.append(task)
            if task.state == "pending":
                self.has_wishes = self.has_wishes or task.lane is not None
            else:
                if task.unique_key is not None:
                    self.keys.append((task.unique_key, task.id))
                result = results.get(task.id) if results else None
                error = errors.get(task.id) if errors else None
                inline = result if result is not None and len(result) <= inline_result else None
                if task.is_own:  # who waits for it waits for the run
                    self.own_ends.append(OwnEnd(task.id, task.state, result, error, inline))
                    continue
                if task.run_id is not None and task.step is None:
                    self.outcomes[task.id] = result, error
                if task.callbacks is not None:
                    self.follow_ups.extend(_follow_ups(task, result, error))
                self.ended.append(Ended(task.id, task.state, inline, error))

    def over(self) -> Iterator[bytes]:
        """Yield tasks that ended, and runs of code whose turns did."""
        yield from (ended.id for ended in self.ended)
        yield from (run for run, _ in self.turns_over)

    def last_claimed(self) -> Attempt | None:
        """Return one of the attempts that it has claimed, if any."""
        task = self.claimed[-1] if self.claimed else self.paged[-1].task if self.paged else None
        return None if task is None else Attempt(task.id, task.attempt)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Do something that may fail: its statements and its news count together, or not at all."""
        news = [field.name for field in fields(self) if field.name not in _NO_NEWS]
        before = {name: copy(getattr(self, name)) for name in news}
        try:
            with self.connection.begin_nested():
                yield
        except BaseException:
            for name, value in before.items():
                setattr(self, name, value)
            self.forget()
            raise

    def forget(self) -> None:
        """Have what is remembered between ticks read again from Postgres: something was rolled back."""
        self.dags.forget()
        self.lanes.forget()
        self.backlog.forget()


def _follow_ups(task: Moved, result: bytes | None, error: TaskError | None) -> Iterable[NewTask]:
    callbacks = msgspec.convert(task.callbacks, Callbacks)
    if task.state == TaskState.SUCCESS:
        return after_success(task.id, task.attempt, callbacks, result)
    if task.state == TaskState.FAILED:
        return after_end(task.id, task.attempt, callbacks, error)
    return ()
