"""Between the code of one run and its history: it takes commands, and delivers their results."""

from __future__ import annotations

import logging
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
handled: ContextVar[history.UpdateRequested | None] = ContextVar("handled", default=None)
"""The update whose handler runs, if the history has its answer."""


class Expected(Protocol):
    """Something that the code waits for."""

    id: bytes

    def settle(self, outcome: Settled) -> None:
        """Take what came of it."""


class Commander:
    """Where the code of one run commands, and hears what came of it. It is used by one thread at a time."""

    def __init__(self, workflow: str, run_id: bytes, limit: int, largest: int) -> None:
        self.workflow = workflow
        """The name of the workflow."""
        self.run_id = run_id
        self.origin = run_id
        """The run whose random numbers and UUIDs the code is given: another one, if this one was reset from it."""
        self.limit = limit
        """The largest value, in bytes, that stays in a history: state, and answers."""
        self.largest = largest
        """The largest one that the payload store may take: results, and what others are given."""
        self.loop = Loop(self)  # type: ignore[abstract]  # what it lacks, nothing in a workflow may use
        self.ledger = Ledger(run_id)
        self.started: history.RunStarted | None = None
        self.began_at = 0.0
        self.number = 0
        """The event that the code was last shown."""
        self.weight = 0
        """Bytes of the values that came with what it was shown."""
        self.now = 0.0
        self.step = 0
        """How often the code was shown something, or came back from outside: its turns."""
        self.commanded = 0
        """How many commands it has given in this turn."""
        self.is_away = False
        """Something runs in its thread that is not its code."""
        self.read_only = ""
        """The query or validator that runs, if nothing may be commanded or changed at the moment."""
        self.is_told = True
        """The leader says what becomes of signals, and how other runs end."""
        self.spoilt = False
        """A query has tried to change it: it must not be kept in memory."""
        self.offence: OrchestratorError | None = None
        """The call of the code that cannot be repeated."""
        self.raised: TaskError | None = None
        """The exception that the code has raised during a replay."""
        self.ended = False
        self.closed = False
        """The code is evicted: what it still does counts for nothing."""
        self.mailboxes: dict[str, Mailbox] = {}
        self._timers: dict[bytes, tuple[Timer, commands.StartTimer | None]] = {}
        self._pending: dict[bytes, Expected] = {}
        self._early: dict[bytes, Settled | history.TimerFired] = {}
        """Results of commands that the code has not given yet: it gave them sooner when the history was made."""

    @property
    def replaying(self) -> bool:
        """Say whether the code does at the moment what it did before, in an activation that was applied."""
        return self.closed or self.number <= self.ledger.shown

    @property
    def is_stopped(self) -> bool:
        """Say whether the code must run no further."""
        return self.offence is not None or self.ledger.violation is not None

    def raise_if_stopped(self) -> None:
        """Raise what keeps the code from going on, also if the code itself has caught it."""
        violation = self.ledger.violation
        if violation is not None:
            raise DeterminismViolation(violation.message, violation.event, violation.difference)
        if self.offence is not None:
            raise self.offence

    # -- from the code

    def next(self, kind: commands.Kind) -> tuple[int, bytes]:
        self.check_writable()
        self.commanded += 1
        ordinal, identifier = self.ledger.next(kind)
        if self.ledger.has_answers and kind != "timer" and (update := handled.get()) is not None:
            self.ledger.check_answered(update, kind, ordinal)  # a timer may be taken back before it leaves
        return ordinal, identifier

    def issue(self, command: Command) -> history.Record | None:
        """Take a command from the code; return its record if it was applied before."""
        self.check_writable()
        return self._allow(self.ledger.issue(command))

    def issue_once(self, command: Command, key: bytes | str, *, anyway: bool = False) -> None:
        """Take a command that names its subject; `anyway` is for commands that are allowed also during a query."""
        if not anyway:
            self.check_writable()
        self.ledger.issue_once(command, key)

    def _allow(self, record: history.Record | None) -> history.Record | None:
        """Refuse what undoes the steps of a run that, according to its history, has not failed."""
        was_passed = self.number <= self.ledger.went_on and not self.ledger.is_copy
        if record is None and self.raised is not None and was_passed:
            self.ledger.violate_by_raising(self.number, self.raised)
        return record

    def expect(self, future: Expected) -> None:
        """Let a future be settled by what comes of it; that may be known already."""
        early = self._early.pop(future.id, None)
        if early is None:
            self._pending[future.id] = future
        else:
            assert not isinstance(early, history.TimerFired)
            future.settle(early)

    @property
    def awaits(self) -> bytes:
        """The one task, promise or child that the code waits for; empty if there are more, or none."""
        return next(iter(self._pending)) if len(self._pending) == 1 else b""

    def forget(self, identifier: bytes) -> None:
        """Wait no longer for what comes of it."""
        self._pending.pop(identifier, None)

    def cancel_command(self, command: Command, identifier: bytes) -> None:
        """Cancel something that the code no longer waits for."""
        if not self.closed and not self.ended:
            self.ledger.issue_once(command, identifier)

    def mailbox(self, name: str) -> Mailbox:
        if self.read_only:
            return self.mailboxes.get(name) or Mailbox(name)
        if name not in self.mailboxes:
            self.mailboxes[name] = Mailbox(name)
        return self.mailboxes[name]

    def stop(self, error: OrchestratorError) -> None:
        """Let the code run no further: it has done something that cannot be repeated."""
        self.offence = self.offence or error

    def check_writable(self) -> None:
        """Refuse what the code may not do at the moment."""
        if self.closed:
            raise Evicted
        if self.read_only:
            self.check_unseen("commanding something")

    def check_unseen(self, what: str) -> None:
        """Refuse changes during a query or validator; should that be caught, the code is evicted."""
        if self.read_only:
            self.spoilt = True
            raise InvalidWorkflow(
                f"The {self.read_only} may look at the workflow, but command nothing and change nothing of it. "
                f"Refused: {what}."
            )

    # -- from the loop

    def start_timer(self, timer: Timer, seconds: float, name: str) -> None:
        ordinal, timer.id = self.next("timer")
        taken_at = self.ledger.reopened.get(f"timer {ordinal}") if self.replaying else None
        since = self.now if taken_at is None else taken_at
        command = commands.StartTimer(ordinal, timer.id, seconds, since, name, taken_at is not None)
        recorded = self._allow(self.ledger.issue(command))
        if self._early.pop(timer.id, None) is not None:
            self.loop.fire(timer)
        else:
            self._timers[timer.id] = timer, None if recorded else command

    def cancel_timer(self, timer: Timer) -> None:
        self.check_unseen("cancelling a timer")
        found = self._timers.pop(timer.id, None)
        if found is None or self.closed or self.ended:
            return
        command = found[1]
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
        """Begin the turn of the code in which it is shown this event."""
        self.number = event.number
        self.step, self.commanded = self.step + 1, 0
        self.weight += history.weight(event.what)
        self.now = max(self.now, event.at)

    def begin(self, fact: history.RunStarted) -> None:
        """Take how the run began."""
        self.started = fact
        self.began_at = self.now
        self.origin = fact.origin or self.run_id

    def settle(self, fact: Settled) -> None:
        future = self._pending.pop(fact.id, None)
        if future is None:
            self._early[fact.id] = fact
        else:
            future.settle(fact)

    def fire(self, fact: history.TimerFired) -> None:
        found = self._timers.pop(fact.id, None)
        if found is None:
            self._early[fact.id] = fact
        else:
            self.loop.fire(found[0])

    def signal(self, fact: history.SignalReceived) -> None:
        box = self.mailbox(fact.name)
        box.waiting.put_nowait(fact.value)
        if box.deliver is not None:
            box.deliver()

    def waiting_for(self) -> str:
        return ", ".join([*map(repr, self._pending.values()), *("<Timer>" for _ in self._timers)])


def current() -> Commander | None:
    """Return the commander of the workflow whose code is running in this thread."""
    commander: Commander | None = running.commander
    return commander


def enter(commander: Commander | None) -> Commander | None:
    """Make this the workflow whose code is running here; return which one it was before."""
    before: Commander | None = running.commander
    running.commander = commander
    return before
