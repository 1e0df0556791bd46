"""The client's side of an API: the same calls as the backend's, over HTTP.

remote ─┬─ tasks  runs  workflows  code  schedules  queues  fleet  insights    made from their declarations
        ├─ waiting      one long poll for many waits
        ├─ asking       a request, tried again where that is safe, and its answer or error
        └─ http         connections that are kept open
"""

from __future__ import annotations

from typing import cast

from orchestrator.payloads.keeping import forget, register
from orchestrator.sdk.calls.code import CodeWork
from orchestrator.sdk.calls.fleet import FleetCalls
from orchestrator.sdk.calls.flows import FlowCalls
from orchestrator.sdk.calls.insights import InsightCalls
from orchestrator.sdk.calls.quarantine import QuarantineCalls
from orchestrator.sdk.calls.queues import QueueCalls
from orchestrator.sdk.calls.runs import RunWork
from orchestrator.sdk.calls.schedules import ScheduleCalls
from orchestrator.sdk.calls.tasks import TaskWork
from orchestrator.sdk.calls.workflows import WorkflowCalls
from orchestrator.sdk.remote.asking import Asking
from orchestrator.sdk.remote.http import Http
from orchestrator.sdk.remote.parts import RemoteCode, RemoteRuns, RemoteTasks, remote_part
from orchestrator.sdk.remote.payloads import RemotePayloads
from orchestrator.sdk.remote.waiting import Waits
from orchestrator.sealing import vault_of
from orchestrator.settings import Settings

__all__ = ["RemoteBackend"]


class RemoteBackend:
    """The calls of an application over HTTP. Connections are opened on first use."""

    def __init__(self, settings: Settings) -> None:
        vault_of(settings)  # what comes sealed, because the server has no key, is opened here
        self._http = Http(settings)
        asking = Asking(self._http)
        self._asking = asking
        self.waiting = Waits(asking, lambda target: self.tasks.obstacles(target))
        # The declared methods are made when the classes are: no type checker sees them.
        self.tasks = cast(TaskWork, RemoteTasks(asking, self.waiting))
        self.runs = cast(RunWork, RemoteRuns(asking, self.waiting))
        self.code = cast(CodeWork, RemoteCode(asking, self.waiting))
        self.workflows = cast(WorkflowCalls, remote_part("workflows", WorkflowCalls)(asking))
        self.flows = cast(FlowCalls, remote_part("flows", FlowCalls)(asking))
        self.schedules = cast(ScheduleCalls, remote_part("schedules", ScheduleCalls)(asking))
        self.queues = cast(QueueCalls, remote_part("queues", QueueCalls)(asking))
        self.fleet = cast(FleetCalls, remote_part("fleet", FleetCalls)(asking))
        self.quarantine = cast(QuarantineCalls, remote_part("quarantine", QuarantineCalls)(asking))
        register(self._http.url, RemotePayloads(self.tasks))
        self.insights = cast(InsightCalls, remote_part("insights", InsightCalls)(asking))

    def close(self) -> None:
        """Close every connection."""
        forget(self._http.url)
        self.waiting.close()
        self._asking.close()
        self._http.close()
