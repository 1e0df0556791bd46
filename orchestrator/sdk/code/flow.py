"""One run of a workflow, alive in memory: shown events one by one, it answers with commands."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.domain.code import commands, history
from orchestrator.domain.code.activation import Answer, Query
from orchestrator.domain.code.commands import Command
from orchestrator.domain.code.history import Event
from orchestrator.domain.code.replay import Ledger
from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import DeterminismViolation, InvalidTask, InvalidWorkflow, NotDeterministic, OrchestratorError
from orchestrator.sdk.code.compensations import Compensations
from orchestrator.sdk.code.context import ContinueAsNew, WorkflowContext, continuation
from orchestrator.sdk.code.entering import inside
from orchestrator.sdk.code.futures import DurableFuture, Outcome
from orchestrator.sdk.code.handlers import Handlers
from orchestrator.sdk.code.loop import Loop, Timer
from orchestrator.sdk.code.putting_away import UNSTOPPABLE, PutAway, put_away
from orchestrator.sdk.code.signals import Mailbox
from orchestrator.sdk.tasks.failure import describe
from orchestrator.sdk.values.payload import decode_call, encode_value

if TYPE_CHECKING:
    from orchestrator.sdk.code.workflow import CodeWorkflow

T = TypeVar("T")
logger = logging.getLogger("orchestrator.workflow")


class Flow:
    """The live code of one run. It is used by one thread at a time."""

    def __init__(self, workflow: CodeWorkflow[..., Any], run_id: bytes, limit: int) -> None:
        self.workflow = workflow
        self.run_id = run_id
        self.origin = run_id
        """The run whose random numbers and UUIDs the code is given: another one, if this one was reset from it."""
        self.limit = limit
        """The largest value, in bytes, that may be recorded."""
        self.loop = Loop(self)  # type: ignore[abstract]  # what it lacks, nothing in a workflow may use
        self.ledger = Ledger(run_id)
        self.started: history.RunStarted | None = None
        self.number = 0
        """The event that the code was last shown."""
        self.weight = 0
        """Bytes of the values that came with what it was shown."""
        self.now = 0.0
        self.mailboxes: dict[str, Mailbox] = {}
        self.handlers = Handlers(self)
        self.compensations = Compensations(self.report)
        self.read_only = ""
        """Who is looking, if nothing may be commanded or changed at the moment."""
        self.spoilt = False
        """A query has tried to change it: it must not be kept in memory."""
        self.ended = False
        self.step = 0
        """How often the code was shown something, or came back from outside: its turns, for whoever watches them."""
        self.commanded = 0
        """How many commands it has given in this turn."""
        self.is_away = False
        """Something runs in its thread that is not its code."""
        self.began_at = 0.0
        self._closed = False
        self._offence: OrchestratorError | None = None
        self._raised: TaskError | None = None
        """What the code has raised while it was shown what it had been shown before."""
        self._cancel_requested = False
        self._tidying = False
        """The function has ended, and what it leaves is closed and undone."""
        self._continuation: ContinueAsNew | None = None
        """How the run goes on, if a handler has decided so."""
        self._main: asyncio.Task[Any] | None = None
        self._timers: dict[bytes, tuple[Timer, commands.StartTimer | None]] = {}
        self._pending: dict[bytes, DurableFuture[Any]] = {}
        self._early: dict[bytes, Outcome | history.TimerFired] = {}
        """What came of things that the code has not asked for yet: it asked sooner when the history was made."""

    # -- from outside

    def advance(self, events: Iterable[Event], *, whole: bool = False) -> list[Command]:
        """Show the facts among these events to the code, and return what it commands that is new.

        `whole` says that this is all of the history. Raise DeterminismViolation or NotDeterministic if the code cannot
        go on; it must not be used after that.
        """
        if whole:
            events = list(events)
            self.ledger.learn(events)
        with inside(self):
            for event in events:
                show = _SHOW.get(type(event.what))
                if show is None or self.ended:
                    continue
                self.number = event.number
                self.step, self.commanded = self.step + 1, 0
                self.weight += history.weight(event.what)
                self.now = max(self.now, event.at)
                show(self, event.what)
                self.loop.run_until_idle(self.now - self.began_at, self._is_stopped)
                self._finish()
        self._raise_if_stopped()
        return self.ledger.take()

    def answer(self, query: Query) -> Answer:
        """Answer a query."""
        self.step += 1
        with inside(self):
            answer = self.handlers.answer(query)
        if self._offence is not None:  # a query that does what a workflow may not do gets an error, too
            self.spoilt, self._offence = True, None
        return answer

    def close(self) -> None:
        """Put the code away. Its `finally` blocks run, but what they command is not done."""
        self._closed = True
        self.loop.close()
        with inside(self, watched=False):
            put_away(*self.loop.suspended)

    @property
    def replaying(self) -> bool:
        """Say whether the code does at the moment what it did before, in an activation that was applied."""
        return self._closed or self.number <= self.ledger.shown

    def waiting_for(self) -> str:
        """Say what the code waits for, as far as the flow knows."""
        return ", ".join([*map(repr, self._pending.values()), *("<Timer>" for _ in self._timers)])

    # -- from the code

    def next(self, kind: commands.Kind) -> tuple[int, bytes]:
        """Count one more command of a kind."""
        self.check_writable()
        self.commanded += 1
        return self.ledger.next(kind)

    def issue(self, command: Command) -> None:
        """Take a command from the code."""
        self.check_writable()
        self._allow(self.ledger.issue(command))

    def issue_once(self, command: Command, key: bytes | str, *, anyway: bool = False) -> None:
        """Take a command that names what it is about; `anyway` is for what the flow itself has to say."""
        if not anyway:
            self.check_writable()
        self.ledger.issue_once(command, key)

    def _allow(self, record: history.Record | None) -> history.Record | None:
        """Refuse what undoes the steps of a run that, according to its history, has not failed."""
        was_passed = self.number <= self.ledger.went_on and not self.ledger.is_copy
        if record is None and self._raised is not None and was_passed:
            self.ledger.violate_by_raising(self.number, self._raised)
        return record

    def expect(self, future: DurableFuture[T]) -> DurableFuture[T]:
        """Let a future be settled by what comes of it; that may be known already."""
        early = self._early.pop(future.id, None)
        if early is None:
            self._pending[future.id] = future
        else:
            assert not isinstance(early, history.TimerFired)
            future.settle(early)
        return future

    def forget(self, identifier: bytes) -> None:
        """Wait no longer for what comes of it."""
        self._pending.pop(identifier, None)

    def cancel_command(self, command: Command, identifier: bytes) -> None:
        """Cancel something that the code no longer waits for."""
        if not self._closed and not self.ended:
            self.ledger.issue_once(command, identifier)

    def mailbox(self, name: str) -> Mailbox:
        """Return the signals of one name."""
        if self.read_only:
            return self.mailboxes.get(name) or Mailbox(name)
        if name not in self.mailboxes:
            self.mailboxes[name] = Mailbox(name)
        return self.mailboxes[name]

    def continue_as_new(self, how: ContinueAsNew) -> None:
        """End the function, and go on in a new run: somebody beside it has decided so."""
        if self._main is not None and self._continuation is None:
            self._continuation = how
            self._main.cancel()

    def stop(self, error: OrchestratorError) -> None:
        """Let the code run no further: it has done something that cannot be repeated."""
        self._offence = self._offence or error

    # -- from the loop

    def start_timer(self, timer: Timer, seconds: float, name: str) -> None:
        ordinal, timer.id = self.next("timer")
        command = commands.StartTimer(ordinal, timer.id, seconds, self.now, name)
        recorded = self._allow(self.ledger.issue(command))
        if self._early.pop(timer.id, None) is not None:
            self.loop.fire(timer)
        else:
            self._timers[timer.id] = timer, None if recorded else command

    def cancel_timer(self, timer: Timer) -> None:
        self.check_unseen("cancelling a timer")
        found = self._timers.pop(timer.id, None)
        if found is None or self._closed or self.ended:
            return
        command = found[1]
        if command is None or not self.ledger.withdraw(command):
            self.ledger.issue_once(commands.CancelTimer(timer.id), timer.id)

    def report(self, message: str, error: BaseException | None) -> None:
        if not self.replaying:
            logger.error("%s, run %s: %s", self.workflow.name, to_text(self.run_id), message, exc_info=error)

    # -- facts

    def _begin(self, fact: history.RunStarted) -> None:
        self.started = fact
        self.began_at = self.now
        self.origin = fact.origin or self.run_id
        self._main = self.loop.create_task(self._run(fact.payload), name=self.workflow.name)

    async def _run(self, payload: bytes) -> bytes:
        arguments, keywords = self._arguments(payload)
        try:
            try:
                value = await self.workflow.function(WorkflowContext(self), *arguments, **keywords)
            finally:
                await self._tidy()
            result = encode_value(value, f"The result of workflow {self.workflow.name!r}", self.limit)
            self.workflow._signature.check_result(value, result)
            return result
        except UNSTOPPABLE:
            raise
        except BaseException as error:
            if self._continued(error) is None:
                if self.number <= self.ledger.went_on and not isinstance(error, asyncio.CancelledError):
                    self._raised = describe(error)
                await self.compensations.run()
            raise

    async def _tidy(self) -> None:
        """Close the generators that the function has left half-way. From here on, no cancel interrupts anything."""
        self._tidying = True
        if not self._closed:
            await self.loop.close_generators()

    def _arguments(self, payload: bytes) -> tuple[list[Any], dict[str, Any]]:
        """Return what the run was started with; who started it has checked that against the signature of then."""
        arguments, keywords = decode_call(payload)
        try:
            return self.workflow._signature.restore(arguments, keywords)
        except InvalidTask as error:
            message = f"Signature mismatch (event 1): the run was started with arguments that do not fit: {error}"
            self.ledger.violate(1, "SignatureMismatch", message)

    def _settle(self, fact: Outcome) -> None:
        future = self._pending.pop(fact.id, None)
        if future is None:
            self._early[fact.id] = fact
        else:
            future.settle(fact)

    def _fire(self, fact: history.TimerFired) -> None:
        found = self._timers.pop(fact.id, None)
        if found is None:
            self._early[fact.id] = fact
        else:
            self.loop.fire(found[0])

    def _signal(self, fact: history.SignalReceived) -> None:
        self.mailbox(fact.name).waiting.put_nowait(fact.value)

    def _update(self, fact: history.UpdateRequested) -> None:
        self.handlers.update(fact)

    def _cancel(self, fact: history.RunCancelRequested) -> None:
        main = self._main
        assert main is not None, "a run begins before anything else happens in it"
        is_at_it = self._cancel_requested and main.cancelling()  # unless the code has taken the last one back
        self._cancel_requested = True
        if not self._tidying and not is_at_it:
            main.cancel(fact.reason or None)

    # -- the rest

    def _raise_if_stopped(self) -> None:
        """Raise what keeps the code from going on, also if the code itself has caught it."""
        violation = self.ledger.violation
        if violation is not None:
            raise DeterminismViolation(violation.message, violation.event, violation.difference)
        if self._offence is not None:
            raise self._offence

    def _is_stopped(self) -> bool:
        main = self._main
        return self._offence is not None or self.ledger.violation is not None or (main is not None and main.done())

    def _finish(self) -> None:
        main = self._main
        if main is None or not main.done() or self._offence is not None or self.ledger.violation is not None:
            return
        self.ended = True
        end = self._end(main)
        for answer in self.handlers.last_answers(isinstance(end, commands.ContinueRun)):
            self.ledger.issue_once(answer, answer.id)
        self.ledger.issue_end(end, self.number)

    def _end(self, main: asyncio.Task[Any]) -> commands.End:
        try:
            return commands.CompleteRun(main.result())
        except NotDeterministic as error:
            self.stop(error)
            return commands.FailRun(describe(error))  # never leaves: the run is stuck
        except BaseException as error:  # noqa: BLE001  # whatever the code raises fails its run, SystemExit too
            new = self._continued(error)
            if new is not None:
                taken = {box.name: box.taken for box in self.mailboxes.values()}
                return commands.ContinueRun(new.payload, taken, self.number)
            if isinstance(error, asyncio.CancelledError) and self._cancel_requested:
                return commands.CancelRun()
            return commands.FailRun(describe(error))

    def _continued(self, error: BaseException) -> ContinueAsNew | None:
        """Return how a run goes on whose function has raised this, if it does."""
        if isinstance(error, asyncio.CancelledError):
            return None if self._cancel_requested else self._continuation
        return continuation(error)

    def check_writable(self) -> None:
        """Refuse what the code may not do at the moment."""
        if self._closed:
            raise PutAway
        if self.read_only:
            self.check_unseen("commanding something")

    def check_unseen(self, what: str) -> None:
        """Refuse to change anything while somebody only looks; should that be caught, the code is not kept."""
        if self.read_only:
            self.spoilt = True
            raise InvalidWorkflow(
                f"The {self.read_only} may look at the workflow, but command nothing and change nothing of it. "
                f"Refused: {what}."
            )


_SHOW: dict[type, Callable[[Flow, Any], None]] = {
    history.RunStarted: Flow._begin,
    history.TimerFired: Flow._fire,
    history.SignalReceived: Flow._signal,
    history.UpdateRequested: Flow._update,
    history.RunCancelRequested: Flow._cancel,
    **dict.fromkeys(
        [
            *(history.TaskCompleted, history.TaskFailed, history.TaskCancelled),
            *(history.PromiseResolved, history.PromiseRejected),
            *(history.ChildCompleted, history.ChildFailed, history.ChildCancelled),
        ],
        Flow._settle,
    ),
}
