"""The parts of a remote backend: their declared calls, and what waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

from orchestrator.domain.ids import successor_id, to_text
from orchestrator.domain.sealed import reveal_event
from orchestrator.domain.states import RunState
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import ConfigurationError, NotFound, OrchestratorError, Unavailable, Uncertain, UnknownHandler
from orchestrator.sdk.calls.code import CodeCalls
from orchestrator.sdk.calls.declaring import declared
from orchestrator.sdk.calls.runs import RunCalls, walk_ends
from orchestrator.sdk.calls.tasks import TaskCalls
from orchestrator.sdk.calls.waits import MISSING
from orchestrator.sdk.code.messages import request_id
from orchestrator.sdk.code.recording import Recording
from orchestrator.sdk.remote.asking import Asking, UnknownCall, bound
from orchestrator.sdk.remote.listening import RemoteRunListener
from orchestrator.sdk.remote.waiting import Waits
from orchestrator.sdk.values.payload import decode_value
from orchestrator.sdk.waiting.steps import Pause, Steps, Stream
from orchestrator.store.code.keys import Sent
from orchestrator.time_limits import TimeLimit
from orchestrator.transport.codec import Ended

_LOOK_AGAIN = 0.2
"""Seconds between two looks for where a signal has gone."""


class _Part:
    """Sends requests."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking


@cache
def remote_part(name: str, protocol: type) -> type[_Part]:
    """Return a class that has the declared calls of a protocol."""
    methods = {call.name: bound(call) for call in declared(name, protocol).values()}
    return type(f"Remote{name.title()}", (_Part,), methods)


class _WaitingPart(_Part):
    """Sends requests, and waits."""

    def __init__(self, asking: Asking, waiting: Waits) -> None:
        super().__init__(asking)
        self._waiting = waiting


_Tasks: Any = remote_part("tasks", TaskCalls)
_Runs: Any = remote_part("runs", RunCalls)
_Code: Any = remote_part("code", CodeCalls)


def _or_away(ask: Callable[..., str], *args: Any) -> str:
    try:
        return ask(*args)
    except (Unavailable, Uncertain):
        return "The API cannot be asked how it is"


class RemoteTasks(_WaitingPart, _Tasks):  # type: ignore[misc]
    """Tasks, over HTTP."""

    retries = 0

    def retry(self, task: bytes) -> None:
        """Open a failed task again; what this program knew of failures may be past."""
        super().retry(task)
        self.retries += 1

    def retry_failed(self, wanted: Any) -> int:
        """Open failed tasks again."""
        count: int = super().retry_failed(wanted)
        self.retries += 1
        return count

    def overdue(self, task: bytes) -> str:
        """Say how a task is whose end did not come in time."""
        return _or_away(super().overdue, task)

    async def aenqueue(self, task: NewTask) -> bytes:
        """Create one task while the event loop goes on."""
        created: bytes = await self._asking.run(partial(self.enqueue, task))
        return created

    def enqueue_in(self, given: object, task: NewTask) -> bytes:  # noqa: ARG002
        """Say that this does not work from here."""
        raise ConfigurationError(
            "enqueue_in needs the database of your transaction, and this program uses an API (setting api_url). Call "
            "`task.enqueue(…)` after your commit, or set ORCHESTRATOR_DATABASE_URL and ORCHESTRATOR_REDIS_URL instead."
        )

    def wait(self, task: bytes, limit: TimeLimit) -> Steps[Ended | None]:
        """Wait until a task ends; None if it has not by then."""
        return self._waiting.wait("tasks", task, limit)

    def wait_each(self, tasks: Sequence[bytes], limit: TimeLimit) -> Stream[Ended]:
        """Yield tasks as they end; stop when the time is up."""
        return self._waiting.each("tasks", tasks, limit)


class RemoteRuns(_WaitingPart, _Runs):  # type: ignore[misc]
    """Runs, over HTTP."""

    def ends(self, run: bytes) -> Iterator[Ended]:
        """Yield how each task of a run has ended, in order."""
        return walk_ends(self.ends_after, run)

    def outputs(self, run: bytes, steps: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the output of every step, or of some, of a workflow's run that was not skipped."""
        outputs: dict[str, Any] = decode_value(self.encoded_outputs(run, steps))
        return outputs

    def listen(self, run: bytes) -> RemoteRunListener:
        """Return what hears that a run may have changed."""
        return RemoteRunListener(self._asking.http, run)

    def wait(self, run: bytes, limit: TimeLimit) -> Steps[Ended | None]:
        """Wait until a run ends; None if it has not by then."""
        ended = yield from self._waiting.wait("runs", run, limit)
        if ended is not None and ended.state == MISSING:
            raise NotFound.by_id("run", to_text(run))
        return ended


class RemoteCode(_WaitingPart, _Code):  # type: ignore[misc]
    """Runs of code, over HTTP."""

    def wait(self, run: bytes, limit: TimeLimit, sent: Sent | None = None) -> Steps[Ended | None]:
        """Wait until a run, or the last of those in which it goes on, has ended; None if it has not by then."""
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
            yield Pause(_LOOK_AGAIN)  # unknown yet

    def signal(self, run: bytes, name: str, value: bytes, request: bytes | None = None, known: bool = False) -> None:
        """Send a signal. That it is `known` is said only to a server that asks: older ones know no such field."""
        try:
            super().signal(run, name, value, request)
        except UnknownHandler:
            if not known:
                raise
            super().signal(run, name, value, request, known=True)

    def known(self, workflow: str, runs: list[bytes]) -> list[bytes]:
        """Return those of these runs that are of a workflow; all, if the server is of a release that cannot tell."""
        try:
            found: list[bytes] = super().known(workflow, runs)
        except OrchestratorError as error:
            if type(error) is not OrchestratorError:
                raise
            return runs
        return found

    def history(self, run: bytes) -> Recording:
        """Return the whole history of a run, opened where this program can."""
        found: Recording = super().history(run)
        return Recording(found.run_id, [reveal_event(event) for event in found.events])

    def request_of(self, run: bytes, what: str, id: str) -> bytes:
        """Return the id of the request that a message is; with the previous release it counts for this run alone."""
        try:
            request: bytes = super().request_of(run, what, id)
        except UnknownCall:
            return request_id(run, what, id)
        return request

    def overdue(self, run: bytes, update: str | None = None) -> str:
        """Say how a run is whose end or answer did not come in time."""
        return _or_away(super().overdue, run, update)

    def _try_reached(self, sent: Sent) -> bytes | None:
        try:
            reached: bytes | None = self.reached(sent)
        except (Unavailable, Uncertain):
            return None
        return reached
