"""The handle of a run of a workflow as code."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, overload

from typing_extensions import TypeVar

from orchestrator.domain.code.other_runs import Target
from orchestrator.domain.ids import is_derived, to_text
from orchestrator.domain.runs import WAS_TERMINATED
from orchestrator.domain.sealed import open_error
from orchestrator.domain.states import RunState
from orchestrator.domain.tasks.task import error_text
from orchestrator.errors import ResultTimeout, RunFailed
from orchestrator.sdk.checks import check_event_number, check_label
from orchestrator.sdk.client import Client
from orchestrator.sdk.code.commander import current
from orchestrator.sdk.code.known_handlers import WorkflowSignature
from orchestrator.sdk.code.messages import (
    QueryMethod,
    SignalMethod,
    UpdateMethod,
    answer_of,
    name_of,
    request_id,
    signal_value,
    with_legible_errors,
)
from orchestrator.sdk.code.other_runs import cancel_inside, commanded_by, query_inside, result_inside, signal_inside
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.context import refuse_inside_task
from orchestrator.sdk.values.payload import decode_value, encode_call, encode_value
from orchestrator.sdk.waiting.async_variants import async_variant, async_variant_of, blocking
from orchestrator.sdk.waiting.steps import Steps, check_timeout, time_limit
from orchestrator.time_limits import TimeLimit
from orchestrator.transport.codec import Ended

if TYPE_CHECKING:
    from orchestrator.sdk.code.recording import Recording
    from orchestrator.store.code.keys import Sent

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
W_co = TypeVar("W_co", covariant=True, default=Any)
ANSWERED_WITHIN = 30.0
"""The default timeout of queries and updates, in seconds."""


class WorkflowHandle(Generic[R, W_co]):
    """A run of a workflow. `R` is the type of its result; `W_co` is the workflow's class, or None for a function.

    If the run continues as a new one, or is reset while it is open, the handle follows the new run. The same holds for
    a run that ended before it received the signal of its start: the handle follows the run that received it.
    """

    def __init__(
        self,
        client: Client,
        identifier: bytes,
        signature: WorkflowSignature | None = None,
        sent: Sent | None = None,
        *,
        key: str = "",
    ) -> None:
        self._client = client
        self._id = identifier
        self._target = Target(identifier, key)
        self._signature = signature
        self._sent = sent
        self._message_id: str | None = None
        self._timeout = ANSWERED_WITHIN

    def options(self, *, id: str | None = None, timeout: float = ANSWERED_WITHIN) -> WorkflowHandle[R, W_co]:
        """Return a copy of this handle with other options for sending messages.

        `id` is an id of your own for one signal or update: sent again with it, for example after `Uncertain`, the
        message is applied once, and an update returns the same answer. `timeout` is how long queries and updates wait.
        """
        check_timeout(timeout)
        changed = copy.copy(self)
        changed._message_id, changed._timeout = None if id is None else check_label("message id", id), timeout
        return changed

    @property
    def id(self) -> str:
        """The run's id. For a run that a workflow found by an id of your own, `workflow/` and that id.

        After a start with a signal, this is the run that has the signal at the moment, which is looked up.
        """
        return str(self._target) if self._sent is None else to_text(self._run)

    @property
    def _run(self) -> bytes:
        return self._id if self._sent is None else self._client.backend.code.reached(self._sent) or self._id

    def __repr__(self) -> str:
        return (
            f"<WorkflowHandle {self._signature.name + ' ' if self._signature else ''}{self._target}{self._client.via}>"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkflowHandle) and (other._target, other._client) == (self._target, self._client)

    def __hash__(self) -> int:
        return hash(self._target)

    # -- its end

    @blocking
    def result(self, timeout: float | None = None) -> Steps[R]:
        """Wait for the result and return it. Raise RunFailed if the run failed or was cancelled, or ResultTimeout.

        Inside a workflow, `await handle.aresult()` waits for the end of any run. For a DAG or a flow it returns None.
        """
        refuse_inside_task("a workflow")
        limit = time_limit(timeout)
        code = self._client.backend.code
        ended = yield from code.wait(self._id, limit, self._sent)
        if ended is None:
            with limit:
                reason = code.overdue(self._run)
            raise ResultTimeout(
                f"{self!r} had no result after {timeout} s. {reason}; ask again, or see "
                f"`orchestrator runs show {self.id}`."
            )
        return self._value(ended)

    def status(self) -> str:
        """Return the state: running, `stuck` (the code cannot continue), success, failed, cancelled or terminated."""
        return self._client.backend.code.status(self._run)

    def state(self) -> dict[str, Any]:
        """Return the values that the code has set with `ctx.set` and not cleared, also after the end."""
        state: dict[str, Any] = decode_value(self._client.backend.code.state(self._run))
        return state

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the run, by which lists can be filtered, also after the end."""
        attributes: dict[str, Any] = decode_value(self._client.backend.code.attributes(self._run))
        return attributes

    # -- messages to the run

    @overload
    def signal(self, signal: str, /, value: Any = None) -> None: ...
    @overload
    def signal(self, signal: SignalMethod[W_co, P, Any], /, *args: P.args, **kwargs: P.kwargs) -> None: ...

    def signal(self, signal: str | SignalMethod[Any, ..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Send a signal, named by text or by its method (`Order.pay`). The run keeps it until the code takes it.

        Raise WrongState if the run has ended, NotFound if there is none, UnknownHandler if its class takes no such
        signal. Inside a workflow this is a command and is sent once; there, only `await handle.asignal(…)` raises
        these.
        """
        if current() is not None:
            signal_inside(self, signal, *args, **kwargs)
            return
        name, value = signal_value(signal, args, kwargs, self._client.settings.largest_value, self._signature)
        data = encode_value(value, f"Signal {name!r}", self._client.settings.largest_value)
        request = None if self._message_id is None else _request_of(self._client, self._run, "signal", self._message_id)
        known, id = self._signature is not None, self._message_id or ""
        self._client.backend.code.signal(self._run, name, data, request, known=known, id=id)

    @blocking
    def resolve(self, promise: str, value: Any = None) -> Steps[None]:
        """Resolve the oldest open promise of this name, or else the next one. Raise WrongState if it is settled.

        Raise ResultTimeout if no scheduler leads. The value is stored, and the next leader delivers it.
        """
        data = encode_value(value, f"Promise {promise!r}", self._client.settings.max_payload)
        yield from self._client.backend.code.resolve(self._run, promise, data)

    @blocking
    def reject(self, promise: str, reason: str) -> Steps[None]:
        """Reject the oldest open promise of this name, or else the next one. Raise WrongState if it is settled.

        Raise ResultTimeout if no scheduler leads. The rejection is stored, and the next leader delivers it.
        """
        yield from self._client.backend.code.reject(self._run, promise, reason)

    @overload
    def query(self, query: str, /, *args: Any, timeout: float = ANSWERED_WITHIN, **kwargs: Any) -> Any: ...
    @overload
    def query(self, query: QueryMethod[W_co, P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    @blocking
    def query(self, query: str | QueryMethod[Any, ..., Any], /, *args: Any, **kwargs: Any) -> Steps[Any]:
        """Send a query, named by text or by its method (`Order.total`), and return its answer.

        Ended runs answer too: a worker replays their history, of up to a megabyte. Inside a workflow, `await
        handle.aquery(…)` is a command, and the history keeps the answer.
        """
        name, timeout = name_of(QueryMethod, query, self._signature), kwargs.pop("timeout", self._timeout)
        run, payload = self._encode_request("query", name, args, kwargs, timeout)
        answer = self._client.backend.code.query(run, name, payload, timeout)
        return answer_of(query, (yield from with_legible_errors(answer)))

    @overload
    def update(self, update: str, /, *args: Any, timeout: float = ANSWERED_WITHIN, **kwargs: Any) -> Any: ...
    @overload
    def update(self, update: UpdateMethod[W_co, P, Any, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    @blocking
    def update(self, update: str | UpdateMethod[Any, ..., Any, Any], /, *args: Any, **kwargs: Any) -> Steps[Any]:
        """Send an update, named by text or by its method, and return its answer."""
        if self._message_id is not None:
            sent = yield from self._send_update(update, args, kwargs, self._message_id)
            return (yield from sent._result(kwargs.pop("timeout", self._timeout)))
        name, timeout = name_of(UpdateMethod, update, self._signature), kwargs.pop("timeout", self._timeout)
        run, payload = self._encode_request("update", name, args, kwargs, timeout)
        answer = self._client.backend.code.update(run, name, payload, timeout)
        return answer_of(update, (yield from with_legible_errors(answer)))

    @overload
    def start_update(self, update: str, /, *args: Any, **kwargs: Any) -> UpdateHandle[Any]: ...
    @overload
    def start_update(
        self, update: UpdateMethod[W_co, P, Any, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> UpdateHandle[T]: ...

    @blocking
    def start_update(
        self, update: str | UpdateMethod[Any, ..., Any, Any], /, *args: Any, **kwargs: Any
    ) -> Steps[UpdateHandle[Any]]:
        """Send an update, and return a handle of its answer as soon as the request is durable."""
        return (yield from self._send_update(update, args, kwargs, self._message_id or to_text(new_id())))

    def update_handle(self, id: str, update: UpdateMethod[W_co, ..., Any, T] | None = None) -> UpdateHandle[T]:
        """Return the handle of an update that was sent to this run under an id, even by another process."""
        return UpdateHandle(self._client, self._run, id, update or "")

    def _send_update(
        self, update: str | UpdateMethod[Any, ..., Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any], id: str
    ) -> Steps[UpdateHandle[Any]]:
        name = name_of(UpdateMethod, update, self._signature)
        arguments = {key: value for key, value in kwargs.items() if key != "timeout"}
        run, payload = self._encode_request("update", name, args, arguments, self._timeout)
        request = _request_of(self._client, self._run, "update", id)
        yield from self._client.backend.code.update(run, name, payload, self._timeout, request, answered=False, id=id)
        return UpdateHandle(self._client, self._run, id, update)

    def _encode_request(
        self, kind: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], timeout: float
    ) -> tuple[bytes, bytes]:
        """Check the arguments of a query or update. Return the run's id and the encoded arguments."""
        refuse_inside_task("a workflow")
        check_timeout(timeout)
        payload = encode_call(name, args, kwargs, self._client.settings.max_payload, kind)
        with TimeLimit(timeout):
            return self._run, payload

    def cancel(self) -> None:
        """Ask the run to cancel itself: its code gets CancelledError and may clean up. Raise WrongState if it has
        ended.

        Inside a workflow this is a command; there, only `await handle.acancel()` raises.
        """
        if current() is None:
            self._client.backend.code.cancel(self._run)
        else:
            cancel_inside(self)

    def terminate(self) -> None:
        """End the run immediately, without running its code."""
        self._client.backend.code.terminate(self._run)

    @blocking
    def reset(self, *, to: int, reason: str = "") -> Steps[WorkflowHandle[R, W_co]]:
        """Start a new run that repeats this one up to event `to` of its history, and return its handle.

        Tasks and child runs that had ended by then keep their results; everything else is done again. If this run is
        open, it ends, and its handles follow the new run. Raise WrongState if the run cannot be reset to event `to`.
        """
        refuse_inside_task("a workflow")
        checked = reason and check_label("reason", reason)
        new = yield from self._client.backend.code.reset(self._run, check_event_number(to), checked)
        return WorkflowHandle(self._client, new, self._signature)

    def retry(self) -> None:
        """Retry a stuck run."""
        self._client.backend.runs.retry(self._run)

    def rerun(self) -> WorkflowHandle[R, W_co]:
        """Start a new run with the same arguments, version and tags. `reset` would keep completed work."""
        refuse_inside_task("a workflow")
        new = new_id()
        self._client.backend.runs.rerun(self._run, new, None)
        return WorkflowHandle(self._client, new, self._signature)

    def history(self) -> Recording:
        """Return the history of the run so far."""
        return self._client.backend.code.history(self._run)

    aresult = commanded_by(result_inside, async_variant(result))
    astatus = async_variant(status)
    astate = async_variant(state)
    aattributes = async_variant(attributes)
    aresolve = async_variant(resolve)
    areject = async_variant(reject)
    acancel = commanded_by(partial(cancel_inside, is_awaited=True), async_variant(cancel))
    aterminate = async_variant(terminate)
    areset = async_variant(reset)
    aretry = async_variant(retry)
    arerun = async_variant(rerun)
    ahistory = async_variant(history)

    @overload
    async def asignal(self, signal: str, /, value: Any = None) -> None: ...
    @overload
    async def asignal(self, signal: SignalMethod[W_co, P, Any], /, *args: P.args, **kwargs: P.kwargs) -> None: ...
    @partial(commanded_by, partial(signal_inside, is_awaited=True))
    @async_variant_of(signal)
    async def asignal(self, *_: Any, **__: Any) -> Any: ...

    @overload
    async def aquery(self, query: str, /, *args: Any, timeout: float = ANSWERED_WITHIN, **kwargs: Any) -> Any: ...
    @overload
    async def aquery(self, query: QueryMethod[W_co, P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @partial(commanded_by, query_inside)
    @async_variant_of(query)
    async def aquery(self, *_: Any, **__: Any) -> Any: ...

    @overload
    async def aupdate(self, update: str, /, *args: Any, timeout: float = ANSWERED_WITHIN, **kwargs: Any) -> Any: ...
    @overload
    async def aupdate(self, update: UpdateMethod[W_co, P, Any, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @async_variant_of(update)
    async def aupdate(self, *_: Any, **__: Any) -> Any: ...

    @overload
    async def astart_update(self, update: str, /, *args: Any, **kwargs: Any) -> UpdateHandle[Any]: ...
    @overload
    async def astart_update(
        self, update: UpdateMethod[W_co, P, Any, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> UpdateHandle[T]: ...
    @async_variant_of(start_update)
    async def astart_update(self, *_: Any, **__: Any) -> Any: ...

    def _value(self, ended: Ended) -> R:
        name = f"Workflow {self._signature.name!r}" if self._signature else "The workflow"
        if ended.state == RunState.SUCCESS:
            value = decode_value(ended.result or b"\xc0")
            result: R = self._signature.restore_result(value) if self._signature else value
            return result
        error = ended.error and open_error(ended.error)
        if error is not None and error.kind == WAS_TERMINATED.kind:
            raise RunFailed(f"{name}, run {self.id}, was terminated.", kind=error.kind)
        if ended.state == RunState.CANCELLED or error is None:
            raise RunFailed(f"{name}, run {self.id}, was {ended.state}.")
        text = f"{name}, run {self.id}, failed: {error_text(error.kind, error.message)}\n\n{error.traceback}".rstrip()
        raise RunFailed(text, kind=error.kind, data=error.attributes)


class UpdateHandle(Generic[R]):
    """The handle of an update that was sent to a run."""

    def __init__(self, client: Client, run: bytes, id: str, update: str | UpdateMethod[Any, ..., Any, R]) -> None:
        self._client = client
        self._run = run
        self._update = update
        self.id = id
        """The id of the update; `handle.update_handle(id)` returns this handle again."""

    def __repr__(self) -> str:
        return f"<UpdateHandle {self.id} of run {to_text(self._run)}{self._client.via}>"

    @blocking
    def result(self, timeout: float = ANSWERED_WITHIN) -> Steps[R]:
        """Wait for the answer and return it. The answer is kept with the history of the run."""
        return (yield from self._result(timeout))

    def _result(self, timeout: float) -> Steps[R]:
        refuse_inside_task("a workflow")
        check_timeout(timeout)
        request = _request_of(self._client, self._run, "update", self.id)
        found = self._client.backend.code.update_answer(self._run, request, timeout, id=self.id)
        value: R = answer_of(self._update, (yield from with_legible_errors(found)))
        return value

    def stage(self) -> str:
        """Return the stage of the update: `sent`, `accepted` (its handler runs) or `completed`, whatever its outcome.

        If the run ended without an answer, return `run terminated`, `run failed` and so on.
        """
        request = _request_of(self._client, self._run, "update", self.id)
        return self._client.backend.code.update_stage(self._run, request, id=self.id)

    aresult = async_variant(result)
    astage = async_variant(stage)


def _request_of(client: Client, run: bytes, what: Literal["signal", "update"], id: str) -> bytes:
    """Return the internal id of a message with an id of your own. It counts once in a run and all that follow it."""
    return client.backend.code.request_of(run, what, id) if is_derived(run) else request_id(run, what, id)
