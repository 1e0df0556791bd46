"""`task_routes`, `task_queues` and `task_annotations`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from orchestrator.compat.celery.exceptions import NotCovered
from orchestrator.compat.celery.utils import imported


class Invocation(NamedTuple):
    """A call of a task, as routers see it."""

    app: Any
    name: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}
    task: Any = None
    """None where the program calls a task by its name alone."""


def listed(routes: Any) -> list[Any]:
    """Return the routers of the setting: mappings, lists of pairs, functions or their names."""
    if not routes:
        return []
    found = routes if isinstance(routes, (list, tuple)) and not _is_pairs(routes) else [routes]
    return [_router(one) for one in found]


def _is_pairs(routes: Sequence[Any]) -> bool:
    return all(isinstance(one, (list, tuple)) and len(one) == 2 and isinstance(one[1], Mapping) for one in routes)


def _router(given: Any) -> Any:
    """Return a router; as in Celery, one with `route_for_task` is of before Celery 4, and is not given options."""
    router = imported(given)
    if not hasattr(router, "route_for_task"):
        return router
    route = (router() if isinstance(router, type) else router).route_for_task
    return lambda name, args, kwargs, *_, **__: route(name, args, kwargs)


def find(call: Invocation) -> dict[str, Any]:
    """Return the options that the first router which knows a task gives its calls."""
    for router in listed(call.app.conf.task_routes):
        if callable(router):
            found = router(call.name, call.args, call.kwargs, call.options, task=call.task)
        else:
            found = next((route for pattern, route in _pairs(router) if _fits(pattern, call.name)), None)
        if found:
            return {"queue": found} if isinstance(found, str) else dict(found)
    return {}


def _pairs(router: Any) -> Iterator[tuple[Any, Any]]:
    return iter(router.items() if isinstance(router, Mapping) else router)


def _fits(pattern: Any, name: str) -> bool:
    return bool(pattern.match(name)) if isinstance(pattern, re.Pattern) else fnmatchcase(name, pattern)


def queue_of(conf: Any, exchange: Any, routing_key: Any) -> str:
    for queue in conf.task_queues or ():
        if getattr(queue, "routing_key", None) == routing_key:
            return str(queue.name)
    if exchange is None and routing_key is not None:
        return str(routing_key)
    raise NotCovered(f"exchange={exchange!r}", "Name the queue: queue='…'.")


def annotate(task: Any, conf: Any) -> None:
    """Change a task as `task_annotations` says."""
    annotations = conf.task_annotations
    if not annotations:
        return
    for one in annotations if isinstance(annotations, (list, tuple)) else (annotations,):
        if isinstance(one, Mapping):
            changes = [one.get("*"), one.get(task.name)]
        else:
            changes = [one.annotate(task), getattr(one, "annotate_any", lambda: None)()]
        for change in changes:
            for name, value in (change or {}).items():
                setattr(task, name, value.__get__(task) if callable(value) and name.startswith("on_") else value)
