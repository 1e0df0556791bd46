"""A run of a code workflow in the memory leader."""

from __future__ import annotations

from typing import get_args

from orchestrator.domain.code import commands, history
from orchestrator.domain.code.activation import Activation, Query, Violation
from orchestrator.domain.code.ends import ENCODED_NONE, child_outcome, end_of, run_error, run_state
from orchestrator.domain.code.history import Event
from orchestrator.domain.code.other_runs import failure, settled
from orchestrator.domain.code.promises import Resolution
from orchestrator.domain.runs import WAS_TERMINATED
from orchestrator.domain.tasks.task import NewTask

_FACTS = get_args(history.Fact)


class Run:
    """A run, with its open tasks, timers, promises and child runs."""

    def __init__(self, run_id: bytes, parent: Run | None, detached: bool = False, terminates: bool = False) -> None:
        self.id = run_id
        self.parent = parent
        self.detached = detached
        self.terminates = terminates
        self.child_id = run_id
        """The id under which the parent waits for the run. A continuation inherits it."""
        self.history: list[Event] = []
        self.tasks: dict[bytes, NewTask] = {}
        self.timers: dict[bytes, float] = {}
        self.promises: dict[bytes, str] = {}
        self.early: list[Resolution] = []
        """Resolutions of promises that the code has not created yet."""
        self.settled: set[str] = set()
        """Names of promises that were settled."""
        self.children: dict[bytes, Run] = {}
        self.answers: dict[bytes, history.UpdateAnswered] = {}
        self.state: dict[str, bytes] = {}
        self.end: commands.EndCommand | None = None
        self.next: Run | None = None
        """The run that continues this one."""
        self.timeout: float | None = None
        """The timeout of the run in seconds."""
        self.deadline: float | None = None
        """The time of the timeout or, after the timeout, the end of the grace period."""
        self.timed_out = False
        self.terminated = False
        self.stuck: Violation | None = None
        self.places: list[str] = []
        """The lines at which the code waits."""
        self.attempt = 0
        self.applied = 0
        """The last attempt with events whose report was applied."""
        self.shown = 0
        """The number of the last event shown to the code."""

    @property
    def started(self) -> history.RunStarted:
        first = self.history[0].what
        assert isinstance(first, history.RunStarted)
        return first

    def activation(self, queries: list[Query]) -> Activation:
        """Return what the code is shown next: all events at first, later the new facts."""
        replays_all = self.applied == 0
        events = self.history if replays_all else [event for event in self.history[self.shown :] if is_fact(event)]
        return Activation(
            self.id,
            self.started.workflow,
            self.started.version,
            after=0 if replays_all else self.shown,
            through=len(self.history),
            events=list(events),
            cached=self.applied,
            queries=queries,
            tells=True,
        )

    def continue_as(self, new: Run) -> None:
        """Make a run the continuation of this one, so that waiters follow it."""
        self.next = new
        new.parent, new.child_id = self.parent, self.child_id
        if self.parent is not None and self.child_id in self.parent.children:
            self.parent.children[self.child_id] = new

    def note(self, item: history.HistoryItem) -> None:
        """Update the state and the answers to updates from an event."""
        match item:
            case history.StateSet(key=key, value=value, attribute=""):
                self.state[key] = value
            case history.StateCleared(key=key, is_attribute=False):
                self.state.pop(key, None)
            case history.UpdateAnswered(id=id) as answer:
                self.answers[id] = answer

    @property
    def was_reset(self) -> bool:
        """Whether the run was reset while it was open. The next run then has all of its events."""
        return self.next is not None and isinstance(self.end, commands.CancelRun)

    @property
    def status(self) -> str:
        return "running" if self.end is None else run_state(end_of(self.id, self.end), self.timed_out)

    def settles(self, wait: bytes) -> history.PromiseSettled:
        assert self.end is not None
        end = end_of(self.id, self.end)
        error = WAS_TERMINATED if self.terminated else run_error(end, self.status)
        return settled(wait, failure(self.status, error), end.result or ENCODED_NONE)

    @property
    def depth(self) -> int:
        """The number of ancestors of the run."""
        return self.parent.depth + 1 if self.parent is not None else 0

    @property
    def has_unseen_facts(self) -> bool:
        """Return whether the code has not been shown all events."""
        return self.end is None and any(is_fact(event) for event in self.history[self.shown :])


def fact_for_parent(child: bytes, end: commands.EndCommand, timed_out: bool = False) -> history.Fact:
    run_end = end_of(child, end)
    return child_outcome(child, run_state(run_end, timed_out), run_end)


def is_fact(event: Event) -> bool:
    return isinstance(event.what, _FACTS)
