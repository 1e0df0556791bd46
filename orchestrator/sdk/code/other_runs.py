"""Handles of other runs inside a workflow: signals, queries, cancel requests and waits for the end are commands."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from orchestrator.domain.code import history
from orchestrator.domain.code.commands import CancelPromise, CreatePromise, SignalRun
from orchestrator.domain.code.ends import ENCODED_NONE
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
_RETRY_INTERVAL = 5.0
"""Seconds after which a query is sent again, because it may have been lost with a worker or leader."""


class _Handle(Protocol):
    """The part of a run's handle that commands need."""

    _target: Target
    _signature: WorkflowSignature | None
    _timeout: float


def commanded_by(inside: Callable[..., Any], outside: F) -> F:
    """Return an async method that gives a command when it is called inside a workflow."""

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
    """Query another run. The history keeps the answer."""
    commander, target = _commander(), handle._target
    name = name_of(QueryMethod, query, handle._signature)
    data, digest = encode_call(name, args, kwargs, commander.largest, "query"), digest_call(args, kwargs)
    remaining = total = handle._timeout if timeout is None else timeout
    while remaining > 0:
        ordinal, identifier = commander.next("signal")
        record = commander.issue(SignalRun(ordinal, target.run, QUERY + name, data, digest, identifier, target.key))
        _check_supported(commander, record, "query another run")
        answer: _QueryAnswer[Any] = _QueryAnswer(
            commander, identifier, f"The query {name!r} of run {target}", partial(restored, query), None
        )
        answer.expire_after(min(remaining, _RETRY_INTERVAL))
        try:
            return await answer
        except TimeoutError:
            remaining -= _RETRY_INTERVAL
    raise ResultTimeout(f"The query {name!r} of run {target} had no answer within {total:g} s.")


def cancel_inside(handle: _Handle, /, *, is_awaited: bool = False) -> asyncio.Future[None]:
    """Ask another run to cancel itself."""
    commander = _commander()
    future, record = _send(commander, handle, CANCEL, ENCODED_NONE, "", is_awaited)
    _check_supported(commander, record, "cancel another run")
    return future


def result_inside(handle: _Handle, /, timeout: float | None = None) -> asyncio.Future[Any]:
    """Wait for the end of another run. Cancelling the future does not cancel that run."""
    commander, target = _commander(), handle._target
    ordinal, identifier = commander.next("promise")
    record = commander.issue(CreatePromise(ordinal, identifier, target.wait))
    _check_supported(commander, record, "wait for another run")
    restore = (lambda value: value) if handle._signature is None else handle._signature.restore_result
    future: _Answer[Any] = _Answer(commander, identifier, f"Run {target}", restore, CancelPromise(identifier))
    if timeout is not None:
        future.expire_after(timeout)
    return future


def _send(
    commander: Commander, handle: _Handle, name: str, value: bytes, digest: str, is_awaited: bool
) -> tuple[asyncio.Future[None], Record | None]:
    """Send a signal. If `is_awaited`, the future gets its outcome.

    The future is done immediately if no scheduler will report the outcome: the previous release applied this command,
    or leads at the moment.
    """
    target = handle._target
    ordinal, identifier = commander.next("signal")
    reply_id = identifier if is_awaited and commander.leader_reports else None
    record = commander.issue(SignalRun(ordinal, target.run, name, value, digest, reply_id, target.key))
    if isinstance(record, history.SignalSent):
        reply_id = record.id
    if is_awaited and reply_id is not None:
        return _Answer(commander, identifier, f"Signal {name!r} to run {target}", lambda _: None, None), record
    future: asyncio.Future[None] = commander.loop.create_future()
    future.set_result(None)
    return future, record


def _commander() -> Commander:
    commander = current()
    assert commander is not None, "inside a workflow"
    return commander


def _check_supported(commander: Commander, record: Record | None, action: str) -> None:
    """Make the run stuck until the leading scheduler supports the command."""
    if record is None and not commander.leader_reports:
        error = NotDeterministic(f"Cannot {action}: the leading scheduler is of the previous release. Upgrade it.")
        commander.stop(error)
        raise error


class _Answer(DurableFuture[R]):
    """The outcome of a signal, or the end of a run."""

    def settle(self, outcome: Settled) -> None:
        if isinstance(outcome, history.PromiseRejected) and not self._cancelling:
            self._stop_timer()
            self._fail(self._raised(outcome.error))
        else:
            super().settle(outcome)

    def _raised(self, error: TaskError) -> OrchestratorError:
        return raised(self._label, error)


class _QueryAnswer(_Answer[R]):
    def _raised(self, error: TaskError) -> OrchestratorError:
        return super()._raised(error) if error.phase == REFUSED else unanswered(self._label, error)
