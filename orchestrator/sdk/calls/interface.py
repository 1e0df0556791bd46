"""The interface of a client's backend: all calls, by subject."""

from __future__ import annotations

from typing import Protocol, get_type_hints

from orchestrator.sdk.calls.code import CodeWork
from orchestrator.sdk.calls.fleet import FleetCalls, QuarantineCalls, QueueCalls
from orchestrator.sdk.calls.flows import FlowCalls, WorkflowCalls
from orchestrator.sdk.calls.insights import InsightCalls
from orchestrator.sdk.calls.runs import RunWork
from orchestrator.sdk.calls.schedules import ScheduleCalls
from orchestrator.sdk.calls.tasks import TaskWork


class Calls(Protocol):
    """The calls of a client, by subject."""

    @property
    def tasks(self) -> TaskWork: ...
    @property
    def runs(self) -> RunWork: ...
    @property
    def workflows(self) -> WorkflowCalls: ...
    @property
    def flows(self) -> FlowCalls: ...
    @property
    def code(self) -> CodeWork: ...
    @property
    def schedules(self) -> ScheduleCalls: ...
    @property
    def queues(self) -> QueueCalls: ...
    @property
    def fleet(self) -> FleetCalls: ...
    @property
    def insights(self) -> InsightCalls: ...
    @property
    def quarantine(self) -> QuarantineCalls: ...

    def close(self) -> None:
        """Close every connection."""


PARTS: dict[str, type] = {
    name: get_type_hints(part.fget)["return"] for name, part in vars(Calls).items() if isinstance(part, property)
}
