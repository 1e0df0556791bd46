"""A run of a workflow in memory: it receives events one by one and returns commands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

from orchestrator.domain.code import commands, history
from orchestrator.domain.code.activation import Query, QueryResult
from orchestrator.domain.code.commands import Command
from orchestrator.domain.code.ends import Stage
from orchestrator.domain.code.history import Event
from orchestrator.errors import InvalidTask, NotDeterministic
from orchestrator.sdk.code.commander import Commander, Settled
from orchestrator.sdk.code.context import WorkflowContext
from orchestrator.sdk.code.endings import UNSTOPPABLE, Compensations, continuation, end_coroutines
from orchestrator.sdk.code.handlers import Handlers
from orchestrator.sdk.code.scope import inside
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.sdk.tasks.failure import describe
from orchestrator.sdk.values.payload import decode_call, encode_value

_NO_MESSAGE = 3
"""The rank of events that are not messages."""


class LiveRun:
    """The code of one run, in memory. Used by one thread at a time."""

    def __init__(self, workflow: CodeWorkflow[..., Any], run_id: bytes, limit: int, largest: int | None = None) -> None:
        self.workflow = workflow
        self.commander = Commander(workflow.name, run_id, limit, largest or limit)
        self.handlers = Handlers(self.commander, self._interrupt)
        self._compensations = Compensations(self.commander.report)
        self._cancel_requested = False
        self._is_withheld = False
        """Whether the function may not end the run yet, because a side effect is held."""
        self._is_closing = False
        """Whether the function has ended and its cleanup runs."""
        self._interruption: BaseException | None = None
        """The continuation or error that a handler decided on, if any."""
        self._main: asyncio.Task[Any] | None = None

    # -- called by the engine

    def advance(self, events: Iterable[Event], *, whole: bool = False) -> list[Command]:
        """Show these events to the code, and return its new commands.

        `whole` means that the events are the entire history. Raise DeterminismViolation or NotDeterministic if the code
        cannot continue. Do not use the run after that.
        """
        commander = self.commander
        if whole:
            events = list(events)
            commander.ledger.learn(events)
        together = commander.ledger.merged_facts
        with inside(commander):
            for event in events:
                show = _SHOW.get(type(event.what))
                if show is None or commander.ended:
                    continue
                if together and (group := together.get(event.number)):
                    if event is next(stage.facts[-1] for stage in reversed(group) if stage.facts):
                        self._show_together(group)
                    continue
                commander.turn(event)
                show(self, event.what)
                self._run_until_idle()
        commander.raise_if_stopped()
        return commander.ledger.take()

    def _show_together(self, group: Sequence[Stage]) -> None:
        """Show events together, because the code once ended too early: in each stage first all messages, then the rest
        one by one.

        Messages with a handler come first, because a handler must run before the function ends. Messages of one name
        keep their order. The code gets the result of a stage's side effect after the messages, and ends only then.
        """
        commander = self.commander
        self._is_withheld = group[-1].operation > 0
        for stage in group:
            last = stage.facts[-1] if stage.facts else None
            ranked = sorted(stage.facts, key=self._rank)
            messages = [event for event in ranked if self._rank(event) < _NO_MESSAGE]
            for step in [messages, *([event] for event in ranked[len(messages) :])]:
                for event in step:
                    assert last is not None
                    commander.turn(Event(last.number, last.at, event.what))
                    _SHOW[type(event.what)](self, event.what)
                self._run_until_idle()
                if step is messages and stage.operation:
                    commander.release(stage.operation)
                    self._is_withheld = stage is not group[-1]
                    self._run_until_idle()
                if commander.ended:
                    return

    def _rank(self, event: Event) -> int:
        match event.what:
            case history.RunStarted():
                return 0
            case history.UpdateRequested():
                return 1
            case history.SignalReceived(name=name):
                return 1 if self.commander.mailbox(name).deliver is not None else 2
        return _NO_MESSAGE

    def _run_until_idle(self) -> None:
        commander = self.commander
        commander.loop.run_until_idle(commander.now - commander.began_at, self._is_stopped)
        self._finish()

    def answer(self, query: Query) -> QueryResult:
        commander = self.commander
        commander.step += 1
        with inside(commander):
            answer = self.handlers.answer(query)
        if commander.stop_error is not None:  # the query gets an error, too
            commander.is_dirty, commander.stop_error = True, None
        return answer

    def close(self) -> None:
        """Evict the code. Its `finally` blocks run, but their commands are ignored."""
        self.commander.closed = True
        self.commander.loop.close()
        with inside(self.commander, watched=False):
            end_coroutines(*self.commander.loop.suspended)

    # -- events

    def _begin(self, fact: history.RunStarted) -> None:
        self.commander.begin(fact)
        self._main = self.commander.loop.create_task(self._run(fact.payload), name=self.workflow.name)

    async def _run(self, payload: bytes) -> bytes:
        arguments, keywords = self._arguments(payload)
        commander = self.commander
        context = WorkflowContext(commander, self.workflow, self.handlers, self._compensations)
        try:
            try:
                value = await self.workflow.function(context, *arguments, **keywords)
            except asyncio.CancelledError:
                if self._interruption is None or self._cancel_requested:
                    raise
                raise self._interruption from None
            finally:
                await self._close_generators()
            # In older releases, a run whose function returned succeeded nevertheless.
            if self._interruption is not None and not isinstance(commander.ledger.end, history.RunCompleted):
                raise self._interruption
            result = encode_value(value, f"The result of workflow {self.workflow.name!r}", commander.largest)
            self.workflow._signature.check_result(value, result)
            return result
        except UNSTOPPABLE:
            raise
        except BaseException as error:
            if continuation(error) is None:
                if commander.number <= commander.ledger.continued_after and not isinstance(
                    error, asyncio.CancelledError
                ):
                    commander.raised = describe(error)
                await self._compensations.run()
            raise

    async def _close_generators(self) -> None:
        """Close the generators that the function left unfinished. From here on, cancelling interrupts nothing."""
        self._is_closing = True
        if not self.commander.closed:
            await self.commander.loop.close_generators()

    def _arguments(self, payload: bytes) -> tuple[list[Any], dict[str, Any]]:
        """Decode the arguments of the run. The signature may have changed since the start checked them."""
        arguments, keywords = decode_call(payload)
        try:
            return self.workflow._signature.restore(arguments, keywords)
        except InvalidTask as error:
            message = f"Signature mismatch (event 1): the run was started with arguments that do not match: {error}"
            self.commander.ledger.violate(1, "SignatureMismatch", message)

    def _cancel(self, fact: history.RunCancelRequested) -> None:
        main = self._main
        assert main is not None, "a run begins before anything else happens in it"
        is_cancelling = self._cancel_requested and main.cancelling()  # unless the code has uncancelled it
        self._cancel_requested = True
        if not self._is_closing and not is_cancelling:
            main.cancel(fact.reason or None)

    # -- the end of the run

    def _interrupt(self, error: BaseException) -> None:
        """End the function with an error, because a handler continued as new or failed."""
        if self._main is not None and self._interruption is None and not self._is_closing:
            self._interruption = error
            self._main.cancel()

    def _is_stopped(self) -> bool:
        has_ended = self._main is not None and self._main.done() and not self._is_withheld
        return self.commander.is_stopped or has_ended

    def _finish(self) -> None:
        main, commander = self._main, self.commander
        if main is None or not main.done() or commander.is_stopped or self._is_withheld:
            return
        commander.ended = True
        end = self._end(main)
        for answer in self.handlers.last_answers(isinstance(end, commands.ContinueRun)):
            commander.ledger.issue_once(answer, answer.id)
        commander.ledger.issue_end(end, commander.number)

    def _end(self, main: asyncio.Task[Any]) -> commands.EndCommand:
        commander = self.commander
        try:
            return commands.CompleteRun(main.result())
        except NotDeterministic as error:
            commander.stop(error)
            return commands.FailRun(describe(error))  # not sent: the run is stuck
        except BaseException as error:  # noqa: BLE001  # any exception fails the run, even SystemExit
            continued = continuation(error)
            if continued is not None:
                signals_taken = {box.name: box.taken for box in commander.mailboxes.values()}
                return commands.ContinueRun(continued.payload, signals_taken, commander.number)
            if isinstance(error, asyncio.CancelledError) and self._cancel_requested:
                return commands.CancelRun()
            return commands.FailRun(describe(error))


_SHOW: dict[type, Callable[[LiveRun, Any], None]] = {
    history.RunStarted: LiveRun._begin,
    history.UpdateRequested: lambda flow, fact: flow.handlers.update(fact),
    history.RunCancelRequested: LiveRun._cancel,
    history.TimerFired: lambda flow, fact: flow.commander.fire(fact),
    history.SignalReceived: lambda flow, fact: flow.commander.signal(fact),
    **dict.fromkeys(get_args(Settled), lambda flow, fact: flow.commander.settle(fact)),
}
"""The handler of each type of event shown to the code."""
