"""Plain routes, derived from the calls that declare one: each acts on one thing, or shows it."""

from __future__ import annotations

import re
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta

from orchestrator.api.context import LARGEST, Api, Asked, Done
from orchestrator.api.endpoints import Endpoint, largest_body
from orchestrator.api.key_scope import BACKFILL, QUEUE, RUN, TASK, WORKFLOW
from orchestrator.sdk.calls.declaring import Declared, Kind, Rest, declared
from orchestrator.sdk.calls.interface import PARTS

_PATH_PARAMS = {"id": UUID, "workflow": str, "name": str, "number": Annotated[int, Meta(ge=1, le=LARGEST)]}
_SUBJECTS = {
    **{Kind.TASK: TASK, Kind.RUN: RUN, Kind.QUEUE: QUEUE, Kind.BACKFILL: BACKFILL},
    **{Kind.WORKFLOW: WORKFLOW, Kind.SCHEDULE: WORKFLOW},
}


def _endpoint(call: Declared, rest: Rest) -> Endpoint:
    [(kind, argument)] = (call.rules.about or {}).items()
    method, path = rest.route.split()

    def perform(api: Api, **named: Any) -> Any:
        first, *others = named.values()
        value = first.bytes if isinstance(first, UUID) else "/".join([first, *others]) if others else first
        result = getattr(getattr(api.backend, call.part), call.name)(**{argument: value})
        if not rest.done:
            return result
        return Asked(first, rest.done) if isinstance(first, UUID) else Done(rest.done)

    perform.__name__ = call.name if call.name.endswith(kind) else f"{call.name}_{kind}"
    said = Asked if "{id}" in path else Done
    return Endpoint(
        method=method,
        path=f"/api/v1{path}",
        call=perform,
        scope=call.rules.scope,
        about=_SUBJECTS[kind],
        tag=call.part,
        status=rest.status,
        summary=call.summary,
        path_params={name: _PATH_PARAMS[name] for name in re.findall(r"{(\w+)", path)},
        answer=said if rest.done else msgspec.structs.fields(call.answer)[0].type,
        is_expensive=call.rules.expensive,
        largest_body=largest_body(call.rules.scope),
    )


routes = [
    _endpoint(call, call.rules.rest)
    for name, part in PARTS.items()
    for call in declared(name, part).values()
    if call.rules.rest is not None
]
