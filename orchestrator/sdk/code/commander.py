"""The commander of one run: takes commands from the code and delivers their results from the history."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol

from orchestrator.domain.code import commands, history
from orchestrator.domain.code.commands import Command
from orchestrator.domain.code.history import Event
from orchestrator.domain.code.replay import Ledger
from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import DeterminismViolation, InvalidWorkflow, OrchestratorError
from orchestrator.sdk.code.endings import Evicted
from orchestrator.sdk.code.loop import Loop, Timer
from orchestrator.sdk.code.signals import Mailbox
from orchestrator.sdk.inside import running

logger = logging.getLogger("orchestrator.workflow")
Settled = history.Outcome | history.PromiseSettled
handled_update: ContextVar[history.UpdateRequested | None] = ContextVar("handled", default=None)
"""The update whose handler runs, if the history contains its answer."""


class Expected(Protocol):
    """A future that the code waits for."""

    id: bytes

    def settle(self, outcome: Settled) -> None:
        """Set the outcome."""


class Commander:
    """Takes the commands of one run's code, and settles their futures. Used by one thread at a time."""

    def __init__(self, workflow: str, run_id: bytes, limit: int, largest: int) -> None:
        self.workflow = workflow
        """The name of the workflow."""
        self.run_id = run_id
        self.origin = run_id
        """The run that seeds the code's random numbers and UUIDs: another one if this run was reset from it."""
        self.limit = limit
        """The maximum size in bytes of values that stay in the history: state and answers."""
        self.largest = largest
        """The maximum size in bytes of values that the payload store may take: results and arguments."""
        self.loop = Loop(self)  # type: ignore[abstract]  # its missing methods may not be used in a workflow
        self.ledger = Ledger(run_id)
        self.started: history.RunStarted | None = None
        self.began_at = 0.0
        self.number = 0
        """The number of the last event shown to the code."""
        self.weight = 0
        """Bytes of the values in all events shown to the code."""
        self.now = 0.0
        self.step = 0
        """The number of turns: how often the code received an event or returned from other code."""
        self.commanded = 0
        """The number of commands in this turn."""
        self.is_away = False
        """Whether the thread runs other code than the workflow's."""
        self.read_only = ""
        """The running query or validator, during which commands and changes are refused; else empty."""
        self.leader_reports = True
        """Whether the leader reports the outcomes of signals and of other runs. Older releases do not."""
        self.is_dirty = False
        """A query tried to change the run, which must therefore leave memory."""
        self.stop_error: OrchestratorError | None = None
        """The error of a call that replay cannot repeat."""
        self.raised: TaskError | None = None
        """The exception that the code raised during a replay."""
        self.ended = False
        self.closed = False
        """The code is evicted, and its remaining actions are ignored."""
        self.mailboxes: dict[str, Mailbox] = {}
        self.held: dict[int, Callable[[], None]] = {}
        """By ordinal, functions that settle the futures of side effects among `Ledger.held`."""
        self._timers: dict[bytes, tuple[Timer, commands.StartTimer | None]] = {}
        self._pending: dict[bytes, Expected] = {}
        self._early_results: dict[bytes, Settled | history.TimerFired] = {}
        """Results of commands that the code has not given yet; the code that made the history gave them earlier."""

    @property
    def replaying(self) -> bool:
        """Return whether the code repeats a turn that was already applied."""
        return self.closed or self.number <= self.ledger.shown

    @property
    def is_stopped(self) -> bool:
        """Return whether the code must stop."""
        return self.stop_error is not None or self.ledger.violation is not None

    def raise_if_stopped(self) -> None:
        """Raise the error that stopped the code, even if the code has caught it."""
        violation = self.ledger.violation
        if violation is not None:
            raise DeterminismViolation(violation.message, violation.event, violation.difference)
        if self.stop_error is not None:
            raise self.stop_error

    # -- from the code

    def next(self, kind: commands.Kind) -> tuple[int, bytes]:
        self.check_writable()
        self.commanded += 1
        ordinal, identifier = self.ledger.next(kind)
        if self.ledger.has_answers and kind != "timer" and (update := handled_update.get()) is not None:
            self.ledger.check_answered(update, kind, ordinal)  # a timer may be withdrawn before it is sent
        return ordinal, identifier

    def issue(self, command: Command) -> history.Record | None:
        """Take a command from the code; return its record if it was already applied."""
        self.check_writable()
        return self._allow(self.ledger.issue(command))

    def issue_once(self, command: Command, key: bytes | str, *, anyway: bool = False) -> None:
        """Take a command that is identified by `key`. `anyway` allows it even during a query."""
        if not anyway:
            self.check_writable()
        self.ledger.issue_once(command, key)

    def _allow(self, record: history.Record | None) -> history.Record | None:
        """Record a violation if the code runs undo steps although the run has not failed in its history."""
        was_passed = self.number <= self.ledger.continued_after and not self.ledger.is_copy
        if record is None and self.raised is not None and was_passed:
            self.ledger.violate_by_raising(self.number, self.raised)
        return record

    def expect(self, future: Expected) -> None:
        """Register a future to be settled by its outcome, which may already be known."""
        early = self._early_results.pop(future.id, None)
        if early is None:
            self._pending[future.id] = future
        else:
            assert not isinstance(early, history.TimerFired)
            future.settle(early)

    @property
    def awaits(self) -> bytes:
        """The id of the task, promise or child that the code waits for; empty if there is not exactly one."""
        return next(iter(self._pending)) if len(self._pending) == 1 else b""

    def forget(self, identifier: bytes) -> None:
        """Unregister a future."""
        self._pending.pop(identifier, None)

    def cancel_command(self, command: Command, identifier: bytes) -> None:
        """Issue the command that cancels something the code no longer waits for."""
        if not self.closed and not self.ended:
            self.ledger.issue_once(command, identifier)

    def mailbox(self, name: str) -> Mailbox:
        if self.read_only:
            return self.mailboxes.get(name) or Mailbox(name)
        if name not in self.mailboxes:
            self.mailboxes[name] = Mailbox(name)
        return self.mailboxes[name]

    def stop(self, error: OrchestratorError) -> None:
        """Stop the code: it has done something that replay cannot repeat."""
        self.stop_error = self.stop_error or error

    def check_writable(self) -> None:
        """Raise if the code may not give commands at the moment."""
        if self.closed:
            raise Evicted
        if self.read_only:
            self.check_unseen("commanding something")

    def check_unseen(self, action: str) -> None:
        """Raise InvalidWorkflow during a query or validator, and mark the run for eviction in case the code catches the
        error."""
        if self.read_only:
            self.is_dirty = True
            raise InvalidWorkflow(
                f"The {self.read_only} may read the workflow, but may not issue commands or change state. "
                f"Refused: {action}."
            )

    # -- from the loop

    def start_timer(self, timer: Timer, seconds: float, name: str) -> None:
        ordinal, timer.id = self.next("timer")
        reopened_at = self.ledger.reopened.get(f"timer {ordinal}") if self.replaying else None
        since = self.now if reopened_at is None else reopened_at
        command = commands.StartTimer(ordinal, timer.id, seconds, since, name, reopened_at is not None)
        recorded = self._allow(self.ledger.issue(command))
        if self._early_results.pop(timer.id, None) is not None:
            self.loop.fire(timer)
        else:
            self._timers[timer.id] = timer, None if recorded else command

    def cancel_timer(self, timer: Timer) -> None:
        self.check_unseen("cancelling a timer")
        entry = self._timers.pop(timer.id, None)
        if entry is None or self.closed or self.ended:
            return
        command = entry[1]
        if command is None or not self.ledger.withdraw(command):
            self.ledger.issue_once(commands.CancelTimer(timer.id), timer.id)

    def report(self, message: str, error: BaseException | None) -> None:
        if not self.replaying:
            logger.error(
                "workflow.code_error workflow=%s run=%s: %s",
                self.workflow,
                to_text(self.run_id),
                message,
                exc_info=error,
            )

    # -- from the history

    def turn(self, event: Event) -> None:
        """Begin the turn that shows this event to the code."""
        self.number = event.number
        self.step, self.commanded = self.step + 1, 0
        self.weight += history.weight(event.what)
        self.now = max(self.now, event.at)

    def begin(self, fact: history.RunStarted) -> None:
        """Take the run's first event."""
        self.started = fact
        self.began_at = self.now
        self.origin = fact.origin or self.run_id

    def release(self, operation: int) -> None:
        """Let the code get the outcome of a side effect that was held."""
        self.ledger.held.discard(operation)
        self.held.pop(operation, lambda: None)()

    def settle(self, fact: Settled) -> None:
        future = self._pending.pop(fact.id, None)
        if future is None:
            self._early_results[fact.id] = fact
        else:
            future.settle(fact)

    def fire(self, fact: history.TimerFired) -> None:
        entry = self._timers.pop(fact.id, None)
        if entry is None:
            self._early_results[fact.id] = fact
        else:
            self.loop.fire(entry[0])

    def signal(self, fact: history.SignalReceived) -> None:
        box = self.mailbox(fact.name)
        box.waiting.put_nowait(fact.value)
        if box.deliver is not None:
            box.deliver()

    def waiting_for(self) -> str:
        return ", ".join([*map(repr, self._pending.values()), *("<Timer>" for _ in self._timers)])


def current() -> Commander | None:
    """Return the commander of the workflow that runs in this thread, if any."""
    commander: Commander | None = running.commander
    return commander


def enter(commander: Commander | None) -> Commander | None:
    """Make this the workflow that runs in this thread; return the previous one."""
    before: Commander | None = running.commander
    running.commander = commander
    return before
