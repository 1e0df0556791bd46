"""The states of tasks and runs, and the tables of all allowed transitions.

SQL guards, API filters, documentation and the property tests derive from these two tables. No other change of state is
possible.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

S = TypeVar("S", bound=StrEnum)


class TaskState(StrEnum):
    """The state of a task."""

    PENDING = "pending"
    DISPATCHED = "dispatched"
    RUNNING = "running"
    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"


class RunState(StrEnum):
    """The state of a run."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ShownRunState(StrEnum):
    """The state of a run as displayed: an open run may be stuck, and a cancelled run may be terminated."""

    PENDING = "pending"
    RUNNING = "running"
    STUCK = "stuck"
    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TERMINATED = "terminated"


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition(Generic[S]):
    """An allowed change of state, and when it happens."""

    source: S
    target: S
    when: str


def _expand(rows: Iterable[tuple[tuple[S, ...], S, str]]) -> tuple[Transition[S], ...]:
    return tuple(
        Transition(source=source, target=target, when=when) for sources, target, when in rows for source in sources
    )


_T = TaskState
TASK_TRANSITIONS: tuple[Transition[TaskState], ...] = _expand(
    [
        ((_T.PENDING,), _T.DISPATCHED, "the scheduler claims it, perhaps as it creates it; attempt + 1"),
        ((_T.PENDING,), _T.FAILED, "expired; its run timed out; it cannot be evaluated; no worker knows it"),
        ((_T.PENDING,), _T.SKIPPED, "an upstream failed or a branch was not taken"),
        ((_T.PENDING, _T.DISPATCHED, _T.RUNNING), _T.CANCELLED, "a person or a parent cancelled it"),
        ((_T.DISPATCHED,), _T.RUNNING, "the worker says it started"),
        ((_T.DISPATCHED, _T.RUNNING), _T.PENDING, "message lost, worker drained or lost, or tries left"),
        ((_T.DISPATCHED, _T.RUNNING), _T.SUCCESS, "it returned"),
        ((_T.DISPATCHED, _T.RUNNING), _T.FAILED, "raised, timed out or worker lost, with no tries left"),
        ((_T.FAILED, _T.SKIPPED), _T.PENDING, "a person retries it, or its run"),
        ((_T.CANCELLED,), _T.PENDING, "a person retries it, or its run"),
    ]
)

_R = RunState
RUN_TRANSITIONS: tuple[Transition[RunState], ...] = _expand(
    [
        ((_R.PENDING,), _R.RUNNING, "its first tasks are created"),
        ((_R.PENDING,), _R.FAILED, "invalid, or timed out before it began"),
        ((_R.PENDING,), _R.CANCELLED, "cancelled before it began"),
        ((_R.RUNNING,), _R.SUCCESS, "its last task ended, and all succeeded"),
        ((_R.RUNNING,), _R.FAILED, "its last task ended, and one failed"),
        ((_R.RUNNING,), _R.CANCELLED, "a person or a parent cancelled it"),
        ((_R.FAILED,), _R.RUNNING, "a person retries its failed tasks"),
        ((_R.FAILED,), _R.PENDING, "a person retries it, or the run that started it"),
        ((_R.CANCELLED,), _R.PENDING, "a person retries the run that started it"),
    ]
)

OPEN_TASK_STATES = (TaskState.PENDING, TaskState.DISPATCHED, TaskState.RUNNING)
IN_FLIGHT_STATES = (TaskState.DISPATCHED, TaskState.RUNNING)
ENDED_TASK_STATES = tuple(state for state in TaskState if state not in OPEN_TASK_STATES)
OPEN_RUN_STATES = (RunState.PENDING, RunState.RUNNING)
ENDED_RUN_STATES = tuple(state for state in RunState if state not in OPEN_RUN_STATES)


def sources_of(target: TaskState) -> tuple[TaskState, ...]:
    """Return the states from which a task may enter `target`."""
    return tuple(transition.source for transition in TASK_TRANSITIONS if transition.target is target)


def run_sources_of(target: RunState) -> tuple[RunState, ...]:
    """Return the states from which a run may enter `target`."""
    return tuple(transition.source for transition in RUN_TRANSITIONS if transition.target is target)
