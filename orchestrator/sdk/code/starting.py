"""How a run of a workflow as code is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, get_args

import msgspec

from orchestrator.domain.code import history
from orchestrator.domain.limits.names import scoped
from orchestrator.domain.tasks.starts import OnConflict, StartCode, as_task
from orchestrator.errors import InvalidWorkflow, OrchestratorError
from orchestrator.sdk.client import Client
from orchestrator.sdk.code.current import current_flow
from orchestrator.sdk.code.handle import WorkflowHandle
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.context import current_outlet
from orchestrator.sdk.tasks.options import check_label, check_name, check_tags
from orchestrator.sdk.values.payload import encode_value
from orchestrator.sdk.waiting.twins import twin

if TYPE_CHECKING:
    from orchestrator.sdk.code.workflow import CodeWorkflow

P = ParamSpec("P")
R = TypeVar("R")


class Starting(Generic[P, R]):
    """A workflow, with what is decided for the runs that follow."""

    def __init__(
        self,
        workflow: CodeWorkflow[P, R],
        *,
        id: str | None,
        on_conflict: OnConflict,
        tags: Sequence[str],
        signal: tuple[str, Any] | None,
        pinned: bool,
    ) -> None:
        if on_conflict not in get_args(OnConflict):
            raise InvalidWorkflow(
                f"Option on_conflict: expected one of {', '.join(get_args(OnConflict))}, found {on_conflict!r}."
            )
        if signal is not None and id is None:
            raise InvalidWorkflow("Option signal: it goes to the run under an id; give id= as well.")
        self._workflow = workflow
        self._id = None if id is None else check_label("run id", id)
        self._on_conflict = on_conflict
        self._tags = check_tags(list(tags))
        self._signal = signal
        self._pinned = pinned

    def start(self, /, *args: P.args, **kwargs: P.kwargs) -> WorkflowHandle[R]:
        """Start a run; it is durable when this returns. Inside a task, the scheduler starts it."""
        workflow, client = self._workflow, self._client
        if current_flow() is not None:
            raise OrchestratorError(
                f"A run of workflow {workflow.name!r} cannot be started inside a workflow. "
                f"Use {workflow.name}.schedule(…)."
            )
        payload = workflow._encode_call(args, kwargs)
        options = workflow._code_options
        queue = options.queue or client.route(workflow.name)
        started = history.RunStarted(workflow.name, workflow.version, payload, queue)
        tags = msgspec.json.encode(self._tags).decode()
        outlet = current_outlet()
        if outlet is not None:
            key = None if self._id is None else scoped(workflow.name, self._id)
            signal = self._encoded_signal()
            start = StartCode(started, options.seconds or None, tags, key, self._on_conflict, signal, self._pinned)
            wanted = outlet.next_id()
            return WorkflowHandle(client, outlet.enqueue([as_task(wanted, start)]).get(wanted, wanted), workflow)
        run_id, sent = client.backend.code.start(
            new_id(),
            started,
            timeout=options.seconds or None,
            tags=tags,
            key=self._id,
            on_conflict=self._on_conflict,
            signal=self._encoded_signal(),
            pinned=self._pinned,
        )
        return WorkflowHandle(client, run_id, workflow, sent)

    astart = twin(start)

    @property
    def _client(self) -> Client:
        return self._workflow._client

    def _encoded_signal(self) -> history.SignalReceived | None:
        if self._signal is None:
            return None
        name, value = self._signal
        limit = self._client.settings.max_payload
        return history.SignalReceived(check_name("signal", name), encode_value(value, f"Signal {name!r}", limit))
