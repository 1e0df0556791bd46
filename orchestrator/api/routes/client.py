"""Routes built from the calls that the SDK declares: one for the Python client, and a plain route where `rest=` asks
for it.

The client's route takes the arguments of a call as its body. A plain route has the subject of the call in its path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any
from uuid import UUID

import anyio.to_thread
import msgspec
from msgspec import Meta

from orchestrator.api.bodies import MAX_BODY, MAX_SMALL_REQUEST, ONE_VALUE
from orchestrator.api.client_checks import argument_checks, check_message_id, check_new_task, restrict, visible_part
from orchestrator.api.context import MAX_INT, Api, Asked, Done
from orchestrator.api.endpoints import Endpoint, Routes, max_body
from orchestrator.api.key_scope import BACKFILL, QUEUE, RUN, TASK, WHOLE, WITHIN, WORKFLOW, subject
from orchestrator.api.problems import invalid
from orchestrator.api.redacting import hides_answer, redacted_value
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.errors import OrchestratorError
from orchestrator.sdk.calls.declaring import REPEATED, Body, Declared, Kind, Rest, Wrapped, declared
from orchestrator.sdk.calls.interface import PARTS
from orchestrator.sdk.calls.waits import PATH, End, Ends, Waiting
from orchestrator.sdk.waiting.steps import Pause, Steps
from orchestrator.time_limits import TimeLimit
from orchestrator.transport.codec import Ended

_BODIES = {Body.VALUE: ONE_VALUE, Body.VALUES: MAX_BODY}
_LINGER = 2e-5
"""Seconds per requested id for which further ends are collected after the first one."""
_MAX_IMMEDIATE = 50
"""A wait for at most this many ids is answered as soon as one of them has ended."""

Find = Callable[[Sequence[bytes]], Sequence[Ended]]

routes = Routes("waiting")


@routes.post(
    PATH,
    about=subject("waits", {Kind.TASK: "tasks", Kind.RUN: "runs code"}),
    scope=Scope.ENQUEUE,
    true_values=True,
    examples=[{"tasks": ["AZmy9H1ceji8QVsNbyqOFw=="], "timeout": 20}],
    is_expensive=True,
    max_body=MAX_SMALL_REQUEST,
)
def wait_for_ends(api: Api, body: Waiting) -> Steps[Ends]:
    """Wait until one of many tasks and runs has ended, and return all that have ended by then."""
    kinds = (
        (body.tasks, api.backend.tasks.find_ends),
        (body.runs, api.backend.runs.find_ends),
        (body.code, api.backend.code.find_ends),
    )
    finders: dict[bytes, Find] = {identifier: find for ids, find in kinds for identifier in ids}
    if len(finders) < sum(len({*ids}) for ids, _ in kinds):
        raise invalid("An id occurs in more than one of the lists tasks, runs and code.")
    ended: list[End] = []
    stream = api.backend.waiting.each(list(finders), _by_kind(finders), TimeLimit(body.timeout))
    has_lingered = len(finders) <= _MAX_IMMEDIATE
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
    """Return a function that reads ends of several kinds, each with its own finder."""

    def find(identifiers: Sequence[bytes]) -> list[Ended]:
        ids_by_finder: dict[Find, list[bytes]] = {}
        for identifier in identifiers:
            ids_by_finder.setdefault(finders[identifier], []).append(identifier)
        return [ended for find, ids in ids_by_finder.items() for ended in find(ids)]

    return find


def _checked_call(call: Declared) -> Callable[[Api, KeyScope, dict[str, Any]], Any]:
    """Return a function that checks the arguments of a call and makes it, restricted to a key scope."""
    rules, check = call.rules, argument_checks(call)

    def call_backend(api: Api, key_scope: KeyScope, arguments: dict[str, Any]) -> Any:
        if key_scope.is_bound:
            restrict(rules, api, key_scope, arguments)
            check_message_id(api, call, arguments)
        check(api.settings, arguments)
        if Kind.NEW_TASKS in (rules.about or ()):
            api.names.check(task.name for task in (arguments["tasks"] if "tasks" in arguments else [arguments["task"]]))
        try:
            result = getattr(getattr(api.backend, call.part), call.name)(**arguments)
        except msgspec.MsgspecError as error:
            raise OrchestratorError(f"This release cannot read the stored data: {error}.") from error
        return visible_part(rules, key_scope, result) if key_scope.is_bound else result

    return call_backend


def _endpoint(call: Declared) -> Endpoint:
    rules, call_backend = call.rules, _checked_call(call)
    if rules.redacts:
        hides_answer(call.answer)(partial(_hide_result, rules.redacts))

    def answer(api: Api, body: Any, key_scope: KeyScope) -> Any:
        arguments = {name: getattr(body, name) for name in call.arguments}
        result = call_backend(api, key_scope, arguments | ({REPEATED: True} if rules.assume_repeated else {}))
        return _wait_for(call, result) if call.waits else call.answer(result)

    is_async = (call.part, call.name) == ("tasks", "enqueue")
    function = _enqueue if is_async else answer
    function.__name__ = f"{call.part}_{call.name}"
    return Endpoint(
        method="POST",
        path=call.path,
        call=function,
        is_async=is_async,
        call_large=answer if is_async else None,
        is_expensive=rules.expensive,
        max_body=max_body(rules.scope) if rules.body is None else _BODIES[rules.body],
        scope=rules.scope,
        about=subject(f"{call.part} {call.name}", rules.about),
        takes_key_scope=True,
        true_values=rules.for_programs,
        tag=f"client: {call.part}",
        summary=call.summary,
        body=call.request,
        answer=call.answer,
    )


async def _enqueue(api: Api, body: Any, key_scope: KeyScope) -> Any:
    """Enqueue one task. Concurrent requests share a commit."""
    check_new_task(api.settings, body.task, {})
    await api.names.acheck(body.task.name)
    within = key_scope.queues if key_scope.is_bound else ""
    if body.repeated:
        once_more = partial(api.backend.tasks.enqueue, body.task, within, repeated=True)
        return {"result": await anyio.to_thread.run_sync(once_more)}
    return {"result": await api.backend.tasks.aenqueue_foreign(body.task, within)}


def _wait_for(call: Declared, steps: Steps[Any]) -> Steps[msgspec.Struct]:
    return call.answer((yield from steps))


def _hide_result(argument: str, api: Api, response: Any, body: Any) -> Any:
    """Redact a result by the patterns of its run, whose id is in the request body."""
    hidden = api.redaction_of_run(UUID(bytes=getattr(body, argument)))
    return msgspec.structs.replace(response, result=redacted_value(hidden, response.result))


_PATH_PARAMS = {"id": UUID, "workflow": str, "name": str, "number": Annotated[int, Meta(ge=1, le=MAX_INT)]}
_SUBJECTS = {
    **{Kind.TASK: TASK, Kind.RUN: RUN, Kind.QUEUE: QUEUE, Kind.BACKFILL: BACKFILL},
    **{Kind.WORKFLOW: WORKFLOW, Kind.SCHEDULE: WORKFLOW},
}


def _rest_endpoint(call: Declared, rest: Rest) -> Endpoint:
    rules, call_backend = call.rules, _checked_call(call)
    kind, argument = next(iter((rules.about or {}).items()), (None, ""))
    method, path = rest.route.split()
    result = msgspec.structs.fields(call.answer)[0].type
    wrapping = None if rest.answer is None else _wrapping(rest.answer, result)

    def call_by_path(api: Api, key_scope: KeyScope, **path_params: Any) -> Any:
        first = next(iter(path_params.values()), None)
        value = "/".join(path_params.values()) if len(path_params) > 1 else first
        if isinstance(first, UUID) and call.arguments[argument] is not UUID:
            value = first.bytes
        result = call_backend(api, key_scope, {argument: value} if argument else {})
        if rest.done:
            return Asked(first, rest.done) if isinstance(first, UUID) else Done(rest.done)
        return result if wrapping is None else wrapping(result)

    call_by_path.__name__ = rest.name or (call.name if kind and call.name.endswith(kind) else f"{call.name}_{kind}")
    return Endpoint(
        method=method,
        path=f"/api/v1{path}",
        call=call_by_path,
        scope=rules.scope,
        about=WITHIN if rules.about is None else _SUBJECTS[kind] if kind else WHOLE,
        takes_key_scope=True,
        tag=rest.tag or call.part,
        status=rest.status,
        summary=rest.summary or call.summary,
        path_params={name: _PATH_PARAMS[name] for name in re.findall(r"{(\w+)", path)},
        answer=(Asked if "{id}" in path else Done) if rest.done else wrapping or result,
        is_expensive=rules.expensive,
        max_body=max_body(rules.scope),
    )


def _wrapping(answer: Wrapped, result: Any) -> type[msgspec.Struct]:
    namespace = {"__doc__": answer.description}
    return msgspec.defstruct(answer.name, [(answer.field, result)], frozen=True, namespace=namespace)


_CALLS = [call for name, part in PARTS.items() for call in declared(name, part).values()]
routes.endpoints.extend(map(_endpoint, _CALLS))
routes.endpoints.extend(_rest_endpoint(call, call.rules.rest) for call in _CALLS if call.rules.rest is not None)
