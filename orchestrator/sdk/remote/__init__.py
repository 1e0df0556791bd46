"""The calls of a client over the HTTP API, the same as those of the backend.

remote ─┬─ tasks  runs  workflows  code  schedules  queues  fleet  insights    made from their declarations
        ├─ waiting      one long poll for many waits
        ├─ asking       requests, with retries where they are safe, and their answers and errors
        └─ http         a pool of keep-alive connections
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import IO, Any, cast

from orchestrator.domain.ids import successor_id, to_text
from orchestrator.domain.sealed import reveal_event
from orchestrator.domain.states import RunState
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import (
    ConfigurationError,
    Forbidden,
    NotFound,
    OrchestratorError,
    Unavailable,
    Uncertain,
    UnknownHandler,
)
from orchestrator.payloads.keeping import forget, register
from orchestrator.payloads.objects import Reader, assembled
from orchestrator.references import Reference
from orchestrator.sdk.calls.code import CodeCalls, CodeWork
from orchestrator.sdk.calls.declaring import declared
from orchestrator.sdk.calls.fleet import FleetCalls, QuarantineCalls, QueueCalls
from orchestrator.sdk.calls.flows import FlowCalls, WorkflowCalls
from orchestrator.sdk.calls.insights import InsightCalls
from orchestrator.sdk.calls.runs import RunCalls, RunWork, walk_ends
from orchestrator.sdk.calls.schedules import ScheduleCalls
from orchestrator.sdk.calls.tasks import PayloadPart, TaskCalls, TaskWork
from orchestrator.sdk.calls.waits import MISSING
from orchestrator.sdk.code.messages import request_id
from orchestrator.sdk.code.recording import Recording
from orchestrator.sdk.remote.asking import Asking, UnknownCall, bound
from orchestrator.sdk.remote.http import Http
from orchestrator.sdk.remote.waiting import RemoteRunListener, Waits
from orchestrator.sdk.values.payload import decode_value
from orchestrator.sdk.waiting.steps import Pause, Steps, Stream
from orchestrator.sealing import vault_of
from orchestrator.settings import Settings
from orchestrator.store.code.keys import Sent
from orchestrator.time_limits import TimeLimit
from orchestrator.transport.codec import Ended

__all__ = ["RemoteBackend"]


class RemoteBackend:
    """The calls of an application over HTTP. Connections are opened on first use."""

    def __init__(self, settings: Settings) -> None:
        vault_of(settings)  # decrypts values here if the server has no data key
        self._http = Http(settings)
        self._asking = Asking(self._http)
        self.waiting = Waits(self._asking, lambda target: self.tasks.obstacles(target))
        shared = self._asking, self.waiting
        # The declared methods are created at run time, so type checkers do not see them.
        self.tasks = cast(TaskWork, RemoteTasks(*shared))
        self.runs = cast(RunWork, RemoteRuns(*shared))
        self.code = cast(CodeWork, RemoteCode(*shared))
        self.workflows = cast(WorkflowCalls, remote_part("workflows", WorkflowCalls)(*shared))
        self.flows = cast(FlowCalls, remote_part("flows", FlowCalls)(*shared))
        self.schedules = cast(ScheduleCalls, remote_part("schedules", ScheduleCalls)(*shared))
        self.queues = cast(QueueCalls, remote_part("queues", QueueCalls)(*shared))
        self.fleet = cast(FleetCalls, remote_part("fleet", FleetCalls)(*shared))
        self.quarantine = cast(QuarantineCalls, remote_part("quarantine", QuarantineCalls)(*shared))
        self.insights = cast(InsightCalls, remote_part("insights", InsightCalls)(*shared))
        register(self._http.url, RemotePayloads(self.tasks))

    def close(self) -> None:
        forget(self._http.url)
        self.waiting.close()
        self._asking.close()
        self._http.close()


_POLL_INTERVAL = 0.2
"""Seconds between two polls for the run that receives a signal."""


class _Part:
    """The base class of the calls about one subject."""

    def __init__(self, asking: Asking, waiting: Waits) -> None:
        self._asking = asking
        self._waiting = waiting


@cache
def remote_part(name: str, protocol: type) -> type[_Part]:
    """Make a class with the declared calls of a protocol."""
    methods = {call.name: bound(call) for call in declared(name, protocol).values()}
    return type(f"Remote{name.title()}", (_Part,), methods)


_Tasks: Any = remote_part("tasks", TaskCalls)
_Runs: Any = remote_part("runs", RunCalls)
_Code: Any = remote_part("code", CodeCalls)


def _or_unavailable(ask: Callable[..., str], *args: Any) -> str:
    try:
        return ask(*args)
    except (Unavailable, Uncertain):
        return "The API cannot be reached"


class RemoteTasks(_Tasks, _Part):  # type: ignore[misc]
    """Calls about tasks, over HTTP."""

    retries = 0

    def retry(self, task: bytes) -> None:
        """Retry a failed task, and invalidate cached ends."""
        super().retry(task)
        self.retries += 1

    def retry_failed(self, wanted: Any) -> int:
        count: int = super().retry_failed(wanted)
        self.retries += 1
        return count

    def overdue(self, task: bytes) -> str:
        return _or_unavailable(super().overdue, task)

    async def aenqueue(self, task: NewTask) -> bytes:
        created: bytes = await self._asking.run(partial(self.enqueue, task))
        return created

    def enqueue_in(self, given: object, task: NewTask) -> bytes:  # noqa: ARG002
        raise ConfigurationError(
            "enqueue_in needs the database of your transaction, and this program uses an API (setting api_url). Call "
            "`task.enqueue(…)` after your commit, or set ORCHESTRATOR_DATABASE_URL and ORCHESTRATOR_REDIS_URL instead."
        )

    def wait(self, task: bytes, limit: TimeLimit) -> Steps[Ended | None]:
        return self._waiting.wait("tasks", task, limit)

    def wait_each(self, tasks: Sequence[bytes], limit: TimeLimit) -> Stream[Ended]:
        return self._waiting.each("tasks", tasks, limit)


class RemoteRuns(_Runs, _Part):  # type: ignore[misc]
    """Calls about runs, over HTTP."""

    def ends(self, run: bytes) -> Iterator[Ended]:
        return walk_ends(self.ends_after, run)

    def outputs(self, run: bytes, steps: Sequence[str] | None = None) -> dict[str, Any]:
        outputs: dict[str, Any] = decode_value(self.encoded_outputs(run, steps))
        return outputs

    def listen(self, run: bytes) -> RemoteRunListener:
        return RemoteRunListener(self._asking.http, run)

    def wait(self, run: bytes, limit: TimeLimit) -> Steps[Ended | None]:
        ended = yield from self._waiting.wait("runs", run, limit)
        if ended is not None and ended.state == MISSING:
            raise NotFound.by_id("run", to_text(run))
        return ended


class RemoteCode(_Code, _Part):  # type: ignore[misc]
    """Calls about runs of code, over HTTP."""

    def wait(self, run: bytes, limit: TimeLimit, sent: Sent | None = None) -> Steps[Ended | None]:
        while True:
            ended = yield from self._waiting.wait("code", run, limit)
            if ended is None:
                return None
            if ended.state == MISSING:
                raise NotFound(ended.error.message if ended.error else to_text(run))
            if ended.state == RunState.SUCCESS and ended.error is not None:
                run = successor_id(run)
                continue
            if sent is None:
                return ended
            with limit:
                reached = self._try_reached(sent)
            if reached == sent.run:
                return ended
            if reached is not None:
                run, sent = reached, None
                continue
            if limit.is_up:
                return None
            yield Pause(_POLL_INTERVAL)  # not decided yet

    def signal(
        self,
        run: bytes,
        name: str,
        value: bytes,
        request: bytes | None = None,
        known: bool = False,
        id: str = "",
    ) -> None:
        """Send a signal. Send `known` and `id` only when the server needs them: older servers reject these fields."""
        fields: dict[str, Any] = {}
        while True:
            try:
                super().signal(run, name, value, request, **fields)
            except UnknownHandler:
                if not known or "known" in fields:
                    raise
                fields["known"] = True
            except Forbidden:
                if not id or "id" in fields:
                    raise
                fields["id"] = id
            else:
                return

    def update(self, *args: Any, id: str = "", **options: Any) -> Steps[bytes]:
        return _with_id(partial(super().update, *args, **options), id)

    def update_answer(self, *args: Any, id: str = "") -> Steps[bytes]:
        return _with_id(partial(super().update_answer, *args), id)

    def update_stage(self, run: bytes, request: bytes, id: str = "") -> str:
        try:
            stage: str = super().update_stage(run, request)
        except Forbidden:
            if not id:
                raise
            stage = super().update_stage(run, request, id=id)
        return stage

    def known(self, workflow: str, runs: list[bytes]) -> list[bytes]:
        """Return those of the runs that belong to a workflow; all of them if an older server cannot tell."""
        try:
            found: list[bytes] = super().known(workflow, runs)
        except OrchestratorError as error:
            if type(error) is not OrchestratorError:
                raise
            return runs
        return found

    def history(self, run: bytes) -> Recording:
        recording: Recording = super().history(run)
        return Recording(recording.run_id, [reveal_event(event) for event in recording.events])

    def request_of(self, run: bytes, what: str, id: str) -> bytes:
        """Return the request id of a message. With an older server, the id is unique in this run only."""
        try:
            request: bytes = super().request_of(run, what, id)
        except UnknownCall:
            return request_id(run, what, id)
        return request

    def overdue(self, run: bytes, update: str | None = None) -> str:
        return _or_unavailable(super().overdue, run, update)

    def _try_reached(self, sent: Sent) -> bytes | None:
        try:
            reached: bytes | None = self.reached(sent)
        except (Unavailable, Uncertain):
            return None
        return reached


def _with_id(ask: Callable[..., Steps[bytes]], id: str) -> Steps[bytes]:
    """Make a call, without the sender's id at first: servers of earlier releases reject the field."""
    try:
        return (yield from ask())
    except Forbidden:
        if not id:
            raise
    return (yield from ask(id=id))


class RemotePayloads:
    """Reads stored payloads over HTTP."""

    def __init__(self, tasks: TaskCalls) -> None:
        self._tasks = tasks

    def encoded(self, reference: Reference) -> bytes:
        parts = _Parts(self._tasks, reference)
        if reference.item is not None:
            return parts.chunk(0)
        return assembled(reference, parts.each())

    def open(self, reference: Reference) -> IO[bytes]:
        return io.BufferedReader(Reader(_Parts(self._tasks, reference)))


class _Parts:
    def __init__(self, tasks: TaskCalls, reference: Reference) -> None:
        self._tasks = tasks
        self._reference = reference
        self._first: PayloadPart | None = self._ask(0)
        self.chunks = self._first.parts

    def _ask(self, number: int) -> PayloadPart:
        return self._tasks.payload_part(self._reference.task, self._reference.encoded(), number)

    def chunk(self, number: int) -> bytes:
        if number == 0 and self._first is not None:
            first, self._first = self._first, None
            return first.data
        return self._ask(number).data

    def each(self) -> Iterator[bytes]:
        return map(self.chunk, range(self.chunks))

    def close(self) -> None:
        """Do nothing: no connection is held."""
