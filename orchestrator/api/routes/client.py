"""What the Python client asks for: each call that the SDK declares, as it is; and ends, for many who wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from uuid import UUID

import anyio.to_thread
import msgspec

from orchestrator.api.bodies import LARGEST_BODY, LARGEST_QUESTION, ONE_VALUE
from orchestrator.api.client_checks import CHECKS
from orchestrator.api.client_lists import KEPT, NARROWED, TRIMMED
from orchestrator.api.client_reach import KEEPS_WITHIN, WAITS, about
from orchestrator.api.context import Api
from orchestrator.api.endpoints import Endpoint, Routes, costs, largest_body
from orchestrator.api.problems import refused
from orchestrator.api.redacting import hides_answer, value_shown
from orchestrator.domain.access import Reach, Scope
from orchestrator.errors import OrchestratorError
from orchestrator.sdk.calls.code import CodeCalls
from orchestrator.sdk.calls.declaring import REPEATED, Declared, declared
from orchestrator.sdk.calls.fleet import FleetCalls
from orchestrator.sdk.calls.flows import FlowCalls
from orchestrator.sdk.calls.insights import InsightCalls
from orchestrator.sdk.calls.quarantine import QuarantineCalls
from orchestrator.sdk.calls.queues import QueueCalls
from orchestrator.sdk.calls.runs import RunCalls
from orchestrator.sdk.calls.schedules import ScheduleCalls
from orchestrator.sdk.calls.tasks import TaskCalls
from orchestrator.sdk.calls.waits import PATH, End, Ends, Waiting
from orchestrator.sdk.calls.workflows import WorkflowCalls
from orchestrator.sdk.waiting.steps import Pause, Steps
from orchestrator.time_limits import TimeLimit
from orchestrator.transport.codec import Ended

PARTS: dict[str, type] = {
    "tasks": TaskCalls,
    "runs": RunCalls,
    "workflows": WorkflowCalls,
    "flows": FlowCalls,
    "code": CodeCalls,
    "schedules": ScheduleCalls,
    "queues": QueueCalls,
    "fleet": FleetCalls,
    "insights": InsightCalls,
    "quarantine": QuarantineCalls,
}
_MAKES_TASKS = {("tasks", "enqueue_many"), ("runs", "start")}
"""Calls that come with ids of tasks: who asks may have done so before, where a proxy has held up the request."""
_EXPENSIVE = {
    *(("tasks", name) for name in ("enqueue_many", "retry_failed", "preview_retry", "payload_part")),
    *(("runs", name) for name in ("start", "rerun", "ends_after", "encoded_outputs")),
    *(("schedules", name) for name in ("apply", "upcoming", "backfill", "preview_backfill")),
    *(("insights", name) for name in ("search", "open_runs", "enough_of_ids")),
    ("workflows", "apply"),
    ("workflows", "list_latest"),
    ("flows", "publish"),
    ("code", "history"),
    ("queues", "purge"),
}
_LARGEST = {
    **dict.fromkeys((("tasks", "enqueue"), ("tasks", "enqueue_many"), ("runs", "start")), LARGEST_BODY),
    **dict.fromkeys((("workflows", "apply"), ("flows", "publish"), ("schedules", "apply")), LARGEST_BODY),
    ("code", "query"): ONE_VALUE,
}
"""Bytes of calls that bring many values, follow-ups among them, or definitions; a query reads, and brings one."""
_FOR_PROGRAMS = {
    *(("tasks", "payload_part"), ("runs", "ends_after"), ("runs", "encoded_outputs"), ("flows", "shared")),
    *(("code", name) for name in ("history", "query", "update", "resolve", "reject", "reset")),
}
"""Calls that return what a program goes on with, and so as it is; `read` does for none of them but queries."""
_LINGER = 2e-5
"""Seconds, for each id that is asked for, in which further ends are gathered once there is one."""
_FEW = 50
"""So few are told at once."""

Find = Callable[[Sequence[bytes]], Sequence[Ended]]

routes = Routes("waiting")


@routes.post(
    PATH,
    about=WAITS,
    scope=Scope.ENQUEUE,
    true_values=True,
    examples=[{"tasks": ["AZmy9H1ceji8QVsNbyqOFw=="], "timeout": 20}],
)
@costs(expensive=True, body=LARGEST_QUESTION)
def wait_for_ends(api: Api, body: Waiting) -> Steps[Ends]:
    """Wait for the first of many tasks and runs to end, and return all that have ended by then."""
    kinds = (
        (body.tasks, api.backend.tasks.find_ends),
        (body.runs, api.backend.runs.find_ends),
        (body.code, api.backend.code.find_ends),
    )
    finders: dict[bytes, Find] = {identifier: find for ids, find in kinds for identifier in ids}
    if len(finders) < sum(len({*ids}) for ids, _ in kinds):
        raise refused(422, "The request does not fit", "An id is given twice, as that of different things.")
    ended: list[End] = []
    stream = api.backend.waiting.each(list(finders), _by_kind(finders), TimeLimit(body.timeout))
    has_lingered = len(finders) <= _FEW
    try:
        for item in stream:
            if not isinstance(item, Pause):
                ended.append(End(item.id, item.state, item.result, item.error))
            elif not ended:
                yield item
            elif has_lingered:
                break
            else:
                has_lingered = True
                yield Pause(_LINGER * len(finders))
    finally:
        stream.close()
    return Ends(ended)


def _by_kind(finders: dict[bytes, Find]) -> Find:
    """Return who looks for ends of different kinds."""

    def find(identifiers: Sequence[bytes]) -> list[Ended]:
        sought: dict[Find, list[bytes]] = {}
        for identifier in identifiers:
            sought.setdefault(finders[identifier], []).append(identifier)
        return [ended for find, ids in sought.items() for ended in find(ids)]

    return find


def _endpoint(call: Declared) -> Endpoint:
    check = CHECKS.get((call.part, call.name))
    if (call.part, call.name) == ("code", "query"):
        hides_answer(call.answer)(_hide_answer)

    def answer(api: Api, body: Any, reach: Reach) -> Any:
        given = {name: getattr(body, name) for name in call.signature.parameters if name != "self"}
        if (call.part, call.name) in _MAKES_TASKS:
            given[REPEATED] = True
        if reach.is_bound and (call.part, call.name) in KEEPS_WITHIN:
            given["within"] = reach.queues
        if reach.is_bound and (narrow := NARROWED.get((call.part, call.name))):
            given |= narrow(api, reach, given)
        if check is not None:
            check(api.settings, **given)
        if (call.part, call.name) == ("tasks", "enqueue_many"):
            api.names.check(task.name for task in given["tasks"])
        try:
            done = getattr(getattr(api.backend, call.part), call.name)(**given)
        except msgspec.MsgspecError as error:
            raise OrchestratorError(f"What is stored cannot be read by this release: {error}.") from error
        if reach.is_bound and (keep := (KEPT | TRIMMED).get((call.part, call.name))):
            done = keep(reach, done)
        return _wait_for(call, done) if call.waits else call.answer(done)

    is_async = (call.part, call.name) == ("tasks", "enqueue")
    function = _enqueue if is_async else answer
    function.__name__ = f"{call.part}_{call.name}"
    return Endpoint(
        method="POST",
        path=call.path,
        call=function,
        is_async=is_async,
        call_large=answer if is_async else None,
        is_expensive=(call.part, call.name) in _EXPENSIVE,
        largest_body=_LARGEST.get((call.part, call.name), largest_body(call.scope)),
        scope=call.scope,
        about=about(call.part, call.name),
        takes_reach=True,
        true_values=(call.part, call.name) in _FOR_PROGRAMS,
        tag=f"client: {call.part}",
        status=200,
        summary=call.summary,
        description="",
        places={},
        body=call.request,
        answer=call.answer,
    )


async def _enqueue(api: Api, body: Any, reach: Reach) -> Any:
    """Create one task; those that come at the same time share a commit."""
    CHECKS["tasks", "enqueue"](api.settings, task=body.task)
    await api.names.acheck(body.task.name)
    within = reach.queues if reach.is_bound else ""
    if body.repeated:
        once_more = partial(api.backend.tasks.enqueue, body.task, within, repeated=True)
        return {"result": await anyio.to_thread.run_sync(once_more)}
    return {"result": await api.backend.tasks.aenqueue_foreign(body.task, within)}


def _wait_for(call: Declared, steps: Steps[Any]) -> Steps[msgspec.Struct]:
    return call.answer((yield from steps))


def _hide_answer(api: Api, found: Any, asked: Any) -> Any:
    """Hide what a query was answered with, from those who only read."""
    hidden = api.redaction_of_run(UUID(bytes=asked.run))
    return msgspec.structs.replace(found, result=value_shown(hidden, found.result))


routes.found.extend(_endpoint(call) for name, part in PARTS.items() for call in declared(name, part).values())
