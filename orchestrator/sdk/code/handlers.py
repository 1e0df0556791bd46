"""Query, update and signal handlers: functions of a workflow that process messages."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from orchestrator.domain.code import history
from orchestrator.domain.code.activation import NO_HANDLER, Query, QueryResult
from orchestrator.domain.code.commands import AnswerUpdate
from orchestrator.domain.code.replay import was_handled
from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import InvalidTask, InvalidWorkflow, did_you_mean
from orchestrator.sdk.checks import check_name
from orchestrator.sdk.code.commander import Commander, handled_update
from orchestrator.sdk.code.endings import UNSTOPPABLE, EndTurn, Evicted, continuation
from orchestrator.sdk.code.scope import is_awaitable, read_only
from orchestrator.sdk.code.signals import Mailbox
from orchestrator.sdk.tasks.failure import describe
from orchestrator.sdk.tasks.signature import Signature
from orchestrator.sdk.values.payload import decode_call, decode_value, encode_value

_UNKNOWN = "The workflow answers no"
ONE_VALUE = "A signal carries one value or none; that may be a dataclass."


@dataclass(frozen=True)
class Handler:
    """A registered handler function."""

    function: Callable[..., Any]
    signature: Signature
    validate: Callable[..., Any] | None = None

    def arguments(self, payload: bytes) -> tuple[list[Any], dict[str, Any]]:
        arguments, keywords = decode_call(payload)
        return self.signature.restore(arguments, keywords)


class Handlers:
    """The handlers that a workflow's code has registered so far."""

    def __init__(self, commander: Commander, interrupt: Callable[[BaseException], None]) -> None:
        """`interrupt` ends the workflow's function, either to continue as new or to fail."""
        self._commander = commander
        self._interrupt = interrupt
        self._queries: dict[str, Handler] = {}
        self._updates: dict[str, Handler] = {}
        self.argument_names: dict[tuple[str, str], list[str]] = {}
        """The argument names of the queries, updates and signals that can be sent, by type and name."""
        self._running: dict[bytes, str] = {}
        """The names of the updates that run, by id, in order."""
        self._early: dict[bytes, history.UpdateRequested] = {}
        """Updates that wait for a handler, by id, in order."""
        self._accepted: list[bytes] = []
        self._signalled = 0
        self.is_complete = False
        """Whether all handlers are registered. The handlers of a class are registered before it runs."""

    @property
    def are_finished(self) -> bool:
        """Return whether no update or signal handler is running."""
        return not self._running and not self._signalled

    def add_signal(self, name: str, function: Callable[..., Any]) -> None:
        """Register a signal handler. It also gets signals that arrived earlier."""
        self._commander.check_unseen("registering a signal")
        handler = Handler(function, signal_signature(name, function))
        self.argument_names["signal", name] = handler.signature.names
        box = self._commander.mailbox(check_name("signal", name))
        box.deliver = lambda: self._deliver(box, handler)
        self._commander.loop.call_soon(box.deliver)  # the handler may use names defined below it

    def _deliver(self, box: Mailbox, handler: Handler) -> None:
        while box.waiting.qsize():
            value = decode_value(box.waiting.get_nowait())
            box.taken += 1
            values = [] if value is None and not handler.signature.names else [value]
            try:
                arguments, _ = handler.signature.restore(values, {})
            except InvalidTask as error:  # a signal has no sender to notify
                self._commander.report(f"signal {box.name!r} was dropped: {error}", None)
                continue
            self._signalled += 1
            self._commander.loop.create_task(self._take_signal(box.name, handler, arguments))

    async def _take_signal(self, name: str, handler: Handler, arguments: list[Any]) -> None:
        try:
            value = handler.function(*arguments)
            if inspect.isawaitable(value):
                await value
        except UNSTOPPABLE:
            raise
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001  # the error goes to the run itself
            new = continuation(error)
            if new is None:
                self._commander.report(f"the handler of signal {name!r} failed, and so does the run", error)
            self._interrupt(new or error)
        self._signalled -= 1

    def add_query(self, name: str, function: Callable[..., Any]) -> None:
        """Register a query handler."""
        self._commander.check_unseen("registering a query")
        check_query(name, function)
        self._queries[name] = Handler(function, Signature(name, function, what="Query"))
        self.argument_names["query", name] = self._queries[name].signature.names

    def add_update(self, name: str, function: Callable[..., Any], validate: Callable[..., Any] | None) -> None:
        """Register an update handler, and its optional validator."""
        self._commander.check_unseen("registering an update")
        if validate is not None:
            check_validator(name, function, validate)
        self._updates[name] = Handler(function, Signature(name, function, what="Update"), validate)
        self.argument_names["update", name] = self._updates[name].signature.names
        for request in [request for request in self._early.values() if request.name == name]:
            del self._early[request.id]
            self._commander.loop.call_soon(self._begin, request)  # the handler may use names defined below it

    def answer(self, query: Query) -> QueryResult:
        """Answer a query; commands and changes are refused meanwhile."""
        before, self._commander.is_dirty = self._commander.is_dirty, False
        phase = "unknown"
        try:
            handler = _find(self._queries, "query", query.name)
            phase = "arguments"
            arguments, keywords = handler.arguments(query.payload)
            phase = "failed"
            with read_only(self._commander, f"query {query.name!r}"):
                value = handler.function(*arguments, **keywords)
                if self._commander.is_dirty:
                    self._commander.check_unseen("a command whose error the handler caught")
            data = encode_value(value, f"The answer to query {query.name!r}", self._commander.limit)
            handler.signature.check_result(value, data)
            return QueryResult(query.id, data)
        except EndTurn as error:
            message = f"{error} (setting turn_timeout). Queries must be short."
            return QueryResult(query.id, error=TaskError("TurnTooLong", message, phase=phase))
        except BaseException as error:  # noqa: BLE001  # any exception is the answer, even SystemExit
            return QueryResult(query.id, error=_error(error, phase))
        finally:
            self._commander.is_dirty |= before

    def update(self, request: history.UpdateRequested) -> None:
        """Handle an update. Without a handler it waits, as a signal does. A refused update stays refused."""
        recorded = self._commander.ledger.answer(request.id)
        if recorded is not None and _is_refusal(recorded):
            self._commander.issue_once(AnswerUpdate(request.id, error=recorded.error), request.id, anyway=True)
        elif request.name in self._updates or (self.is_complete and recorded is None):
            self._begin(request)
        else:
            self._early[request.id] = request

    def _was_accepted(self, update: bytes) -> bool:
        """Return whether the history shows that the update's handler ran. Its validator is then not called again."""
        ledger = self._commander.ledger
        return was_handled(ledger.answer(update)) or (bool(ledger.accepted) and to_text(update) in ledger.accepted)

    def _begin(self, request: history.UpdateRequested) -> None:
        """Refuse an update, or start its handler concurrently with the workflow's own code."""
        phase = "unknown"
        try:
            handler = _find(self._updates, "update", request.name)
            phase = "arguments"
            arguments, keywords = handler.arguments(request.payload)
            phase = "refused"
            if handler.validate is not None and not self._was_accepted(request.id):
                with read_only(self._commander, f"validator of update {request.name!r}"):
                    value = handler.validate(*arguments, **keywords)
                if is_awaitable(value):
                    raise InvalidWorkflow(f"The validator of update {request.name!r} must not be async.")
        except (Evicted, EndTurn):
            raise
        except BaseException as error:  # noqa: BLE001  # any exception is the reason of the refusal
            self._commander.issue_once(AnswerUpdate(request.id, error=_error(error, phase)), request.id, anyway=True)
            return
        self._running[request.id] = request.name
        self._accepted.append(request.id)
        self._commander.loop.create_task(self._run(request, handler, arguments, keywords))

    def take_accepted(self) -> list[str]:
        """Return the ids of updates that were accepted in this turn and are not answered yet."""
        accepted, self._accepted = self._accepted, []
        return [to_text(update) for update in accepted if update in self._running]

    def open_updates(self) -> Iterable[str]:
        """Return the names of updates without an answer."""
        yield from self._running.values()
        for request in self._early.values():
            yield f"{request.name}{NO_HANDLER} (it has: {', '.join(sorted(self._updates)) or 'none'})"

    def last_answers(self, continues: bool) -> list[AnswerUpdate]:
        """Return the answers to the updates that are unfinished or unhandled when the run ends."""
        ends = "continued as a new one" if continues else "ended"
        for request in self._early.values():
            self._running[request.id] = request.name
        return [
            AnswerUpdate(
                request, error=TaskError("WrongState", f"The run {ends} before update {name!r} was completed.")
            )
            for request, name in self._running.items()
        ]

    async def _run(
        self, request: history.UpdateRequested, handler: Handler, arguments: list[Any], keywords: dict[str, Any]
    ) -> None:
        if self._commander.ledger.has_answers:
            handled_update.set(request)
        try:
            value = handler.function(*arguments, **keywords)
            returns_awaitable = inspect.isawaitable(value) and not inspect.iscoroutinefunction(handler.function)
            if inspect.isawaitable(value):
                value = await value
            data = encode_value(value, f"The answer to update {request.name!r}", self._commander.limit)
            recorded = self._commander.ledger.answer(request.id)
            # Older releases did not check the types of answers.
            if not returns_awaitable and (recorded is None or recorded.error is not None):
                handler.signature.check_result(value, data)
            answer = AnswerUpdate(request.id, data)
        except UNSTOPPABLE:
            raise
        except asyncio.CancelledError:
            cancelled = TaskError("Cancelled", f"The handler of update {request.name!r} was cancelled.", phase="failed")
            answer = AnswerUpdate(request.id, error=cancelled)
        except BaseException as error:  # noqa: BLE001  # a failed update does not fail the workflow
            new = continuation(error)
            if new is not None:
                self._interrupt(new)
            failed = None if new is not None else _error(error, "failed")
            answer = AnswerUpdate(request.id, error=failed)
        self._commander.issue_once(answer, request.id)
        self._running.pop(request.id, None)


def signal_signature(name: str, function: Callable[..., Any], leading: int = 0) -> Signature:
    """Return the signature of a signal handler, which takes at most one value."""
    signature = Signature(name, function, what="Signal", leading=leading)
    try:
        signature.check([None][: len(signature.names)], {})
    except InvalidTask as error:
        raise InvalidWorkflow(f"{error} {ONE_VALUE}") from None
    return signature


def check_query(name: str, function: Callable[..., Any]) -> None:
    """Raise InvalidWorkflow for an async query handler."""
    if inspect.iscoroutinefunction(function):
        raise InvalidWorkflow(
            f"Query {name!r}: queries are read-only, so the handler must be a plain function, not async."
        )


def check_validator(name: str, function: Callable[..., Any], validate: Callable[..., Any]) -> None:
    """Raise InvalidWorkflow for a validator that is async or does not accept the arguments of its update."""
    called = f"Update {name!r}, its validator {getattr(validate, '__name__', validate)!r}"
    if inspect.iscoroutinefunction(validate):
        raise InvalidWorkflow(f"{called}: validators are read-only, so it must be a plain function, not async.")
    try:
        expected, actual = inspect.signature(function), inspect.signature(validate)
    except ValueError:  # some C functions have no signature
        return
    parameters = expected.parameters.values()
    for passed in (parameters, [param for param in parameters if param.default is param.empty]):
        positional = [param for param in passed if param.kind in (param.POSITIONAL_ONLY, param.POSITIONAL_OR_KEYWORD)]
        keywords = {param.name: param for param in passed if param.kind is param.KEYWORD_ONLY}
        try:
            actual.bind(*positional, **keywords)
        except TypeError as error:
            raise InvalidWorkflow(
                f"{called}: it receives the arguments of the update, expected {expected}, found {actual}: {error}."
            ) from None


def _is_refusal(recorded: AnswerUpdate) -> bool:
    """Return whether a recorded answer is a refusal. Older releases refused an unknown update immediately."""
    return recorded.was_refused or (recorded.error is not None and recorded.error.message.startswith(_UNKNOWN))


def _error(error: BaseException, phase: str) -> TaskError:
    return msgspec.structs.replace(describe(error), phase=phase)


def _find(handlers: dict[str, Handler], kind: str, name: str) -> Handler:
    try:
        return handlers[name]
    except KeyError:
        known = ", ".join(sorted(handlers)) or "none"
        raise InvalidTask(f"{_UNKNOWN} {kind} {name!r}.{did_you_mean(name, handlers)} It answers: {known}.") from None
