"""Server-sent events of tasks, runs, queues and the system."""

from __future__ import annotations

from uuid import UUID

from orchestrator.api.context import Api
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import QUEUE, RUN, TASK, WHOLE
from orchestrator.api.live.answer import Listening, StreamRequest
from orchestrator.api.live.subjects import SYSTEM, Kind, Subject
from orchestrator.sdk.checks import check_name

routes = Routes("live", "/api/v1")


@routes.live("/tasks/{id}/events", about=TASK)
def task_events(api: Api, id: UUID, query: Listening) -> StreamRequest:
    """Stream the events of a task: its states, progress and logs, and its end.

    `snapshot` (as in a list of tasks), `task` when its state changes, `progress`, `log`, and `end`, after which the
    stream closes. A new `snapshot` is sent whenever events may have been missed.
    """
    del api
    return StreamRequest(Subject(Kind.TASK, id.bytes), query.seconds)


@routes.live("/runs/{id}/events", about=RUN)
def run_events(api: Api, id: UUID, query: Listening) -> StreamRequest:
    """Stream the events of a run: its counters and state, the states of its tasks, and its end.

    `snapshot` and `run` (as in a list of runs), `tasks` with those that changed their states, in order, and `end`,
    after which the stream closes. A new `snapshot` is sent whenever events may have been missed.
    """
    del api
    return StreamRequest(Subject(Kind.RUN, id.bytes), query.seconds)


@routes.live("/runs/{id}/logs/events", about=RUN)
def run_log_events(api: Api, id: UUID, query: Listening) -> StreamRequest:
    """Stream the logs of all tasks of a run.

    `snapshot` (as in a list of runs), `log` with each line, the oldest first, with its task and step, and `end`, after
    which the stream closes. A new `snapshot` is sent whenever events may have been missed; log lines continue without a
    gap.
    """
    del api
    return StreamRequest(Subject(Kind.RUN_LOG, id.bytes), query.seconds)


@routes.live("/queues/{name}/events", about=QUEUE)
def queue_events(api: Api, name: str, query: Listening) -> StreamRequest:
    """Stream the state changes of all tasks in a queue.

    `snapshot` (as in the list of queues) and `tasks` with those that changed their states, in order. A new `snapshot`
    is sent when a queue is paused, resumed or limited, and whenever events may have been missed.
    """
    del api
    return StreamRequest(Subject(Kind.QUEUE, check_name("queue", name)), query.seconds)


@routes.live("/status/events", about=WHOLE)
def system_events(api: Api, query: Listening) -> StreamRequest:
    """Stream the activity of the whole system once a second, and workers that start and stop.

    `snapshot` (as `/status`), `activity` with the number of tasks that entered each state, by queue, and of runs, and
    `workers`. A new `snapshot` is sent when a queue is paused, resumed or limited, and whenever events may have been
    missed.
    """
    del api
    return StreamRequest(SYSTEM, query.seconds)
