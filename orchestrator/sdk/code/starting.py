"""Start runs of code workflows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, get_args

import msgspec
from typing_extensions import TypeVar

from orchestrator.domain.code import history
from orchestrator.domain.code.attributes import checked
from orchestrator.domain.code.ends import TOO_LATE
from orchestrator.domain.ids import to_text
from orchestrator.domain.limits.lane_limits import scoped
from orchestrator.domain.tasks.headers import of_start
from orchestrator.domain.tasks.starts import OnConflict, StartCode, as_task
from orchestrator.errors import InvalidWorkflow, NotDeterministic, NotFound, WrongState
from orchestrator.sdk.checks import check_label, check_name, check_tags
from orchestrator.sdk.client import Client
from orchestrator.sdk.code.handle import ANSWERED_WITHIN, W_co, WorkflowHandle
from orchestrator.sdk.code.known_handlers import WorkflowSignature
from orchestrator.sdk.code.messages import UpdateMethod, name_of, signal_value
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.inside import inside_workflow
from orchestrator.sdk.values.payload import encode_call, encode_value
from orchestrator.sdk.values.sealing import outgoing
from orchestrator.sdk.waiting.async_variants import async_variant, blocking
from orchestrator.sdk.waiting.steps import Steps
from orchestrator.sealing import CALL, VALUE
from orchestrator.trace_context import current_trace
from orchestrator.tracing.entry import sending

if TYPE_CHECKING:
    from orchestrator.store.code.keys import Sent

P = ParamSpec("P")
R = TypeVar("R")
U_co = TypeVar("U_co", covariant=True, default=Any)

_TRIES = 5
"""Attempts to deliver an update if each open run ends before the update reaches it."""


class Starting(Generic[P, R, W_co, U_co]):
    """A workflow with options for the runs to start. `U_co` is the type of the update's answer."""

    def __init__(
        self,
        client: Client,
        signature: WorkflowSignature,
        begin: Callable[P, history.RunStarted],
        *,
        timeout: float | None,
        id: str | None,
        on_conflict: OnConflict | None,
        tags: Sequence[str],
        attributes: Mapping[str, object],
        signal: tuple[Any, ...] | None,
        update: tuple[Any, ...] | None,
        update_id: str | None,
        pinned: bool,
    ) -> None:
        if on_conflict is not None and on_conflict not in get_args(OnConflict):
            raise InvalidWorkflow(
                f"Option on_conflict: expected one of {', '.join(get_args(OnConflict))}, found {on_conflict!r}."
            )
        if on_conflict is not None and (signal is not None or update is not None):
            raise InvalidWorkflow(
                "Option on_conflict: it cannot be combined with signal= or update=, which reach the open run "
                "under the id, or start a new run if that has ended."
            )
        if signal is not None and id is None:
            raise InvalidWorkflow("Option signal: it goes to the run under an id; give id= as well.")
        if update is not None and (id is None or signal is not None):
            raise InvalidWorkflow("Option update: it goes to the run under an id; give id= as well, and no signal=.")
        self._update = update
        self._update_id = "" if update_id is None else check_label("message id", update_id)
        self._client = client
        self._signature = signature
        self._begin = begin
        self._timeout = timeout
        self._id = None if id is None else check_label("run id", id)
        self._on_conflict: OnConflict = on_conflict or "reject"
        self._tags = check_tags(tags)
        self._attributes = checked(attributes)
        self._signal = signal
        self._pinned = pinned

    def start(self, /, *args: P.args, **kwargs: P.kwargs) -> WorkflowHandle[R, W_co]:
        """Start a run. The run is durable when this returns. Inside a task, the scheduler starts it."""
        client, name = self._client, self._signature.name
        if client.middleware is not None and of_start.get() is None and not inside_workflow():
            with client.middleware.starting("workflow", name, args, kwargs):
                return self.start(*args, **kwargs)
        if inside_workflow():
            raise NotDeterministic(
                f"A run of workflow {name!r} was started inside a workflow, and every replay would start it "
                f"again. Use `await {name}.schedule(…)`; with options(detached=True) it outlives this one."
            )
        started = self._begin(*args, **kwargs)
        with sending("start", name, started.queue) as traced:
            run_id, sent = self._start(started)
            traced.created(run_id)
        return WorkflowHandle(client, run_id, self._signature, sent)

    def _start(self, started: history.RunStarted) -> tuple[bytes, Sent | None]:
        client, name = self._client, self._signature.name
        tags = msgspec.json.encode(self._tags).decode()
        runtime = client.runtime()
        if runtime is not None:
            if self._update is not None:
                raise InvalidWorkflow("Option update: not inside a task. Start the run with signal= instead.")
            key = None if self._id is None else scoped(name, self._id)
            run_id = runtime.next_id()
            started, signal = self._outgoing(started, run_id), self._encoded_signal(run_id)
            start = StartCode(started, self._timeout, tags, key, self._on_conflict, signal, self._pinned)
            return runtime.enqueue([as_task(run_id, start, current_trace())]).get(run_id, run_id), None
        run_id = new_id()
        signal = self._encoded_signal(run_id)
        return client.backend.code.start(
            run_id,
            self._outgoing(started, run_id),
            timeout=self._timeout,
            tags=tags,
            key=self._id,
            on_conflict=self._on_conflict,
            signal=signal,
            pinned=self._pinned,
            update=self._encoded_update(),
            update_id=self._update_id,
        )

    @blocking
    def execute(self, /, *args: P.args, **kwargs: P.kwargs) -> Steps[U_co]:
        """Send the `update` to the open run with this id, or start a run with it. Return the answer."""
        if self._update is None:
            raise InvalidWorkflow("execute(…) returns the answer to an update: give starting(…) an update=.")
        update, starting = self._update[0], copy.copy(self)
        starting._update_id = self._update_id or to_text(new_id())
        for _ in range(_TRIES):
            handle = starting.start(*args, **kwargs)
            answer = handle.update_handle(starting._update_id, None if isinstance(update, str) else update)
            try:
                result: U_co = yield from answer._result(ANSWERED_WITHIN)
            except NotFound:  # not in any history: the open run ended first, so another is started
                continue
            except WrongState as error:
                if error.data != TOO_LATE:
                    raise
                continue
            return result
        name = name_of(UpdateMethod, update, self._signature)
        raise WrongState(f"{_TRIES} runs in a row under id {self._id!r} ended before update {name!r} reached them.")

    astart = async_variant(start)
    aexecute = async_variant(execute)

    def _outgoing(self, started: history.RunStarted, run: bytes) -> history.RunStarted:
        payload = outgoing(started.payload, CALL, run, self._client.settings)
        attributes = msgspec.json.encode(self._attributes).decode() if self._attributes else ""
        return msgspec.structs.replace(started, payload=payload, attributes=attributes)

    def _encoded_update(self) -> history.UpdateRequested | None:
        if self._update is None:
            return None
        if not self._update_id:
            raise InvalidWorkflow(
                "Option update: give update_id= as well, by which its answer is found, or call execute(…) instead of "
                "start(…), which returns the answer."
            )
        name, *arguments = name_of(UpdateMethod, self._update[0], self._signature), *self._update[1:]
        payload = encode_call(name, arguments, {}, self._client.settings.max_payload, "update")
        return history.UpdateRequested(bytes(16), name, payload)

    def _encoded_signal(self, run: bytes) -> history.SignalReceived | None:
        if self._signal is None:
            return None
        settings = self._client.settings
        signal, *arguments = self._signal
        name, value = signal_value(signal, arguments, {}, settings.largest_value, self._signature)
        data = encode_value(value, f"Signal {name!r}", settings.largest_value)
        return history.SignalReceived(check_name("signal", name), outgoing(data, VALUE, run, settings))
