"""Handles inside a workflow: they signal, query and cancel other runs, and wait for their ends, by commands."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from orchestrator.domain.code import history
from orchestrator.domain.code.commands import CancelPromise, CreatePromise, SignalRun
from orchestrator.domain.code.ends import NOTHING
from orchestrator.domain.code.history import Record
from orchestrator.domain.code.other_runs import CANCEL, QUERY, REFUSED, Target, raised
from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import NotDeterministic, OrchestratorError, ResultTimeout
from orchestrator.sdk.checks import check_name
from orchestrator.sdk.code.commander import Commander, Settled, current
from orchestrator.sdk.code.futures import DurableFuture
from orchestrator.sdk.code.known_handlers import WorkflowSignature
from orchestrator.sdk.code.messages import QueryMethod, SignalMethod, name_of, restored, signal_value
from orchestrator.sdk.code.messages import raised as unanswered
from orchestrator.sdk.values.payload import digest_call, encode_call, encode_value

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")
_ASK_AGAIN = 5.0
"""Seconds after which a query is asked again: it may have been lost with a worker or a leader."""


class _Handle(Protocol):
    """A handle of a run."""

    _target: Target
    _signature: WorkflowSignature | None
    _timeout: float


def commanded_by(inside: Callable[..., Any], outside: F) -> F:
    """Return an async method that is a command inside a workflow."""

    @functools.wraps(outside)
    async def call(handle: Any, /, *args: Any, **kwargs: Any) -> Any:
        if current() is None:
            return await outside(handle, *args, **kwargs)
        handle._client.refuse_cell("A run")
        return await inside(handle, *args, **kwargs)

    return call  # type: ignore[return-value]


def signal_inside(
    handle: _Handle, signal: str | SignalMethod[Any, ..., Any], /, *args: Any, is_awaited: bool = False, **kwargs: Any
) -> asyncio.Future[None]:
    commander = _commander()
    name, value = signal_value(signal, args, kwargs, commander.largest)
    data = encode_value(value, f"Signal {check_name('signal', name)!r}", commander.largest)
    return _send(commander, handle, name, data, digest_call([value], {}), is_awaited)[0]


async def query_inside(
    handle: _Handle, query: str | QueryMethod[Any, ..., Any], /, *args: Any, timeout: float | None = None, **kwargs: Any
) -> Any:
    """Ask the code of another run something; the answer is kept in the history."""
    commander, to = _commander(), handle._target
    name = name_of(QueryMethod, query, handle._signature)
    data, digest = encode_call(name, args, kwargs, commander.largest, "query"), digest_call(args, kwargs)
    left = within = handle._timeout if timeout is None else timeout
    while left > 0:
        ordinal, identifier = commander.next("signal")
        record = commander.issue(SignalRun(ordinal, to.run, QUERY + name, data, digest, identifier, to.key))
        _check_told(commander, record, "query another run")
        answer: _QueryAnswer[Any] = _QueryAnswer(
            commander, identifier, f"The query {name!r} of run {to}", partial(restored, query), None
        )
        answer.expire_after(min(left, _ASK_AGAIN))
        try:
            return await answer
        except TimeoutError:
            left -= _ASK_AGAIN
    raise ResultTimeout(f"The query {name!r} of run {to} had no answer within {within:g} s.")


def cancel_inside(handle: _Handle, /, *, is_awaited: bool = False) -> asyncio.Future[None]:
    """Ask another run to cancel itself."""
    commander = _commander()
    future, record = _send(commander, handle, CANCEL, NOTHING, "", is_awaited)
    _check_told(commander, record, "cancel another run")
    return future


def result_inside(handle: _Handle, /, timeout: float | None = None) -> asyncio.Future[Any]:
    """Wait for the end of another run. Cancelling the future does not cancel that run."""
    commander, to = _commander(), handle._target
    ordinal, identifier = commander.next("promise")
    record = commander.issue(CreatePromise(ordinal, identifier, to.wait))
    _check_told(commander, record, "wait for another run")
    restore = (lambda value: value) if handle._signature is None else handle._signature.restore_result
    future: _Answer[Any] = _Answer(commander, identifier, f"Run {to}", restore, CancelPromise(identifier))
    if timeout is not None:
        future.expire_after(timeout)
    return future


def _send(
    commander: Commander, handle: _Handle, name: str, value: bytes, digest: str, is_awaited: bool
) -> tuple[asyncio.Future[None], Record | None]:
    """Send a signal; the future says what became of it, if that is awaited.

    It is done at once where nobody will say so: the previous release has applied this command, or leads at the moment.
    """
    to = handle._target
    ordinal, identifier = commander.next("signal")
    told = identifier if is_awaited and commander.is_told else None
    record = commander.issue(SignalRun(ordinal, to.run, name, value, digest, told, to.key))
    if isinstance(record, history.SignalSent):
        told = record.id
    if is_awaited and told is not None:
        return _Answer(commander, identifier, f"Signal {name!r} to run {to}", lambda _: None, None), record
    future: asyncio.Future[None] = commander.loop.create_future()
    future.set_result(None)
    return future, record


def _commander() -> Commander:
    commander = current()
    assert commander is not None, "inside a workflow"
    return commander


def _check_told(commander: Commander, record: Record | None, what: str) -> None:
    """Let the run be stuck until a scheduler leads that can do what its code asks for."""
    if record is None and not commander.is_told:
        error = NotDeterministic(f"Cannot {what}: the scheduler that leads is of the previous release. Upgrade it.")
        commander.stop(error)
        raise error


class _Answer(DurableFuture[R]):
    """What became of a signal, or how a run ended."""

    def settle(self, outcome: Settled) -> None:
        if isinstance(outcome, history.PromiseRejected) and not self._cancelling:
            self._stop_timer()
            self._break(self._raised(outcome.error))
        else:
            super().settle(outcome)

    def _raised(self, error: TaskError) -> OrchestratorError:
        return raised(self._what, error)


class _QueryAnswer(_Answer[R]):
    """The answer to a query."""

    def _raised(self, error: TaskError) -> OrchestratorError:
        return super()._raised(error) if error.phase == REFUSED else unanswered(self._what, error)
