"""Work for pull workers, at the root: they may be behind a firewall, and written in any language.

A waiting poll holds neither a thread nor a Postgres connection. A completion is durable before it is answered: the
worker that watches the execution reports it, the leader applies the report, and only then does this process respond.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.endpoints import JSON, Routes
from orchestrator.api.key_scope import WHOLE
from orchestrator.api.problems import refused
from orchestrator.api.routes.registry import Ok, ServiceName, WorkerId
from orchestrator.domain.executors.record import decode_record, task_of
from orchestrator.domain.plain import anchored
from orchestrator.domain.states import ENDED_TASK_STATES, TaskState
from orchestrator.errors import NotFound, Unavailable, WrongState
from orchestrator.payloads.keeping import NoStore, read_encoded
from orchestrator.references import whole_reference
from orchestrator.sdk.waiting.steps import Pause, Steps
from orchestrator.store.tasks import details
from orchestrator.transport.pull import Leased, unwatched_message

routes = Routes("pull", "/queue")

_POLL_INTERVAL = 5.0
"""Seconds after which a poll checks again, because a notification may be lost."""
_APPLY_TIMEOUT = 20.0
"""Seconds to wait until a completion is stored in Postgres, before the client must send it again."""
_UNKNOWN_RETRY = 0.5
"""Seconds before a completion that Redis does not know is retried: a lost offer is renewed soon."""
_LOST = "Redis has restarted or was emptied, and the work is not offered again yet"
_OVERHEAD = 4_096
"""Bytes of a completion besides its result."""

QueueId = Annotated[str, Meta(pattern=anchored("[A-Za-z0-9-]{1,63}~[0-9a-f]{16}"), examples=["x-1~0123456789abcdef"])]


class Poll(msgspec.Struct, frozen=True, kw_only=True):
    """A poll for work."""

    worker_id: WorkerId
    services: Annotated[list[ServiceName], Meta(min_length=1, max_length=100)]
    wait: Annotated[float, Meta(ge=0, le=60)] = 20.0
    """Seconds to wait for work."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Leased work."""

    queue_id: str
    """The id of the lease, for heartbeats and completion."""
    id: str
    """The same as `queue_id`."""
    task_id: str
    task: str
    service: str
    node_key: str
    """The step of the workflow, if the task has one."""
    request_id: str
    """The same for every lease of the work, so that the service can deduplicate requests."""
    attempt: int
    """The number of leases of the work, including this one; earlier leases expired."""
    lease: float
    """Seconds within which the next heartbeat must arrive."""
    input: Any
    params: Any
    input_json: str
    """Input and params as JSON text."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of the work."""

    fraction: Annotated[float, Meta(ge=0, le=1)]
    text: Annotated[str, Meta(max_length=1_000)] = ""


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """A heartbeat of a leased work item."""

    queue_id: QueueId
    progress: Progress | None = None
    """Shown with the task; without it, the previous progress stays."""


class Return(msgspec.Struct, frozen=True, kw_only=True):
    """A leased work item to return."""

    queue_id: QueueId


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a work item."""

    queue_id: QueueId
    result: Any = None
    error: str | dict[str, Any] | None = None
    """The error, if any: a string, or an object with `kind`, `message`, `retryable`, `retry_after` (seconds) and
    `detail`."""
    logs: Annotated[list[str], Meta(max_length=1_000)] = []
    """Log lines for the log of the task."""


@routes.post(
    "/poll",
    about=WHOLE,
    may_be_empty=True,
    true_values=True,
    examples=[{"worker_id": "w1", "services": ["sum"], "wait": 0}],
)
def poll_queue(api: Api, body: Poll) -> Steps[Work | None]:
    """Poll for work: answered once there is some, or with 204 after the wait."""
    services, deadline, pause = list(dict.fromkeys(body.services)), time.monotonic() + body.wait, Pause()
    with api.pull_waiters().offers.listening(services, pause.ring):
        while True:
            leased = api.pull_waiters().pulls.take(body.worker_id, services)
            remaining = deadline - time.monotonic()
            if leased is not None or remaining <= 0:
                return None if leased is None else _answer(api, leased)
            pause.seconds = min(remaining, _POLL_INTERVAL)
            yield pause


@routes.post("/heartbeat", about=WHOLE)
def queue_heartbeat(api: Api, body: Beat) -> Ok:
    """Renew the lease of a work item; 409 if the lease was lost, or the work has ended."""
    progress = b"" if body.progress is None else msgspec.json.encode(body.progress)
    return _ok_if("leased", api, body.queue_id, api.pull_waiters().pulls.beat(body.queue_id, progress))


@routes.post("/return", about=WHOLE)
def return_work(api: Api, body: Return) -> Ok:
    """Return a work item unfinished: the next poll gets it at once. It counts as neither an attempt nor a lease."""
    return _ok_if("returned", api, body.queue_id, api.pull_waiters().pulls.give_back(body.queue_id))


def _ok_if(expected: str, api: Api, queue_id: str, state: str) -> Ok:
    if state == "unknown":
        _refuse_unless_open(api, queue_id)
        raise refused(503, "It is not known yet", f"{_LOST}: continue, and retry the request.")
    if state != expected:
        raise _refusal(state, queue_id)
    return Ok()


@routes.post("/complete", about=WHOLE)
def complete_work(api: Api, body: Completion) -> Steps[Ok]:
    """Complete a work item; answered once the result is stored in Postgres.

    Repeating the request changes nothing, and a different result is rejected with 409.
    """
    completion = msgspec.json.encode({"result": body.result, "error": body.error or "", "logs": body.logs})
    if len(completion) > api.settings.max_payload + _OVERHEAD:
        detail = f"The limit is {api.settings.max_payload:,} bytes (setting max_payload): send an error instead."
        raise refused(413, "The result is too large", detail)
    fingerprint = msgspec.json.encode([body.result, body.error or ""], order="sorted")
    pause, deadline, is_pending = Pause(), time.monotonic() + _APPLY_TIMEOUT, False
    with _waking_at_end(api, body.queue_id, pause) as task:
        while True:
            state = api.pull_waiters().pulls.complete(body.queue_id, completion, fingerprint)
            if state not in ("done", "again", "ended", "unknown"):
                raise _refusal(state, body.queue_id)
            is_pending |= state != "unknown"
            remaining = deadline - time.monotonic()
            if state == "ended" or (state != "done" and is_pending and _has_ended(api, body.queue_id, task)):
                return Ok()
            if state == "unknown":
                _refuse_unless_open(api, body.queue_id)
            if remaining <= 0:
                if state == "unknown":
                    raise refused(503, "It is not known yet", f"{_LOST}: retry the request.")
                raise refused(
                    503,
                    "The result is not stored in Postgres yet",
                    "No leader has applied the result: retry the request.",
                )
            pause.seconds = min(remaining, _UNKNOWN_RETRY if state == "unknown" else _POLL_INTERVAL)
            yield pause


@contextmanager
def _waking_at_end(api: Api, queue_id: str, pause: Pause) -> Iterator[bytes | None]:
    """Wake a pause when the end of a task is announced, or its watcher releases the execution; yield the task."""
    found = api.pull_waiters().pulls.task_of(queue_id)
    task = task_of(queue_id.rpartition("~")[0]) if found is None else UUID(found).bytes
    if task is None:
        yield None
        return

    def wake(_: object) -> None:
        pause.ring()

    announcements = api.backend.waiting.announcements
    announcements.listen(task, wake)
    try:
        with api.pull_waiters().ends.listening([unwatched_message(queue_id.rpartition("~")[0])], pause.ring):
            yield task
    finally:
        announcements.forget(task, wake)


def _has_ended(api: Api, queue_id: str, task: bytes | None) -> bool:
    """Return whether the task has ended, for when its watcher can no longer answer."""
    if task is None:
        return False
    outcome = api.backend.connections.outcomes([task]).get(task)
    if outcome is not None and outcome.status == TaskState.CANCELLED:
        raise _refusal("cancelled", queue_id)
    return outcome is not None and outcome.status in ENDED_TASK_STATES


def _refuse_unless_open(api: Api, queue_id: str) -> None:
    """Raise the reason why Redis does not know a work item; return if it will be offered again in a moment."""
    name = queue_id.rpartition("~")[0]
    task = task_of(name)
    if task is not None:
        with api.backend.connections.reading() as connection:
            found = details.of_open(connection, task)
        if found is not None:
            failures, stored_record = found
            record = decode_record(stored_record)
            if record is None or (record.name, record.failures) == (name, failures):
                return
            raise _refusal("replaced", queue_id)
        if _has_ended(api, queue_id, task):
            raise _refusal("ended", queue_id)
    raise NotFound(f"There is no work item {queue_id}: it ended long ago, or never existed.")


def _refusal(state: str, queue_id: str) -> Exception:
    reasons = {
        "differs": "it was completed with a different result",
        "cancelled": "it was cancelled, or timed out",
        "lost": "this lease has ended; another worker has the work, or may get it",
        "waiting": "the lease expired; the work is offered again, but a result is still accepted",
        "done": "it was completed",
        "ended": "its task has ended",
        "replaced": "this attempt of its task failed; the next attempt is a new work item",
    }
    error = WrongState(f"{queue_id} is no longer leased to this worker: {reasons.get(state, state)}.")
    error.data = {"state": state}
    return error


def _answer(api: Api, leased: Leased) -> Any:
    """Build the response of a poll. A large payload is read here, in a thread, and its values are not decoded."""
    stored = whole_reference(leased.offer.stored)
    if stored is None:
        return _work(leased, leased.offer.body)
    try:
        body = read_encoded(stored)
    except (NoStore, Unavailable):
        api.pull_waiters().pulls.return_unreadable(leased)
        raise
    return Response(msgspec.json.encode(_work(leased, body)), media_type=JSON)


def _work(leased: Leased, text: bytes) -> Work:
    offer, body = leased.offer, msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    return Work(
        queue_id=leased.queue_id,
        id=leased.queue_id,
        task_id=offer.task_id,
        task=offer.task,
        service=offer.service,
        node_key=offer.step,
        request_id=offer.name,
        attempt=leased.number,
        lease=offer.lease,
        input=body["input"],
        params=body["params"],
        input_json=text.decode(),
    )
