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
    """The task; None if the program knows only its name."""


def listed(routes: Any) -> list[Any]:
    """Return the routers of the setting: mappings, lists of pairs, functions or their import paths."""
    if not routes:
        return []
    entries = routes if isinstance(routes, (list, tuple)) and not _is_pairs(routes) else [routes]
    return [_router(entry) for entry in entries]


def _is_pairs(routes: Sequence[Any]) -> bool:
    return all(isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[1], Mapping) for pair in routes)


def _router(value: Any) -> Any:
    """Return a router function. One with `route_for_task` (before Celery 4) gets no options, as in Celery."""
    router = imported(value)
    if not hasattr(router, "route_for_task"):
        return router
    route = (router() if isinstance(router, type) else router).route_for_task
    return lambda name, args, kwargs, *_, **__: route(name, args, kwargs)


def find(call: Invocation) -> dict[str, Any]:
    """Return the options from the first router that matches."""
    for router in listed(call.app.conf.task_routes):
        if callable(router):
            options = router(call.name, call.args, call.kwargs, call.options, task=call.task)
        else:
            options = next((route for pattern, route in _pairs(router) if _matches(pattern, call.name)), None)
        if options:
            return {"queue": options} if isinstance(options, str) else dict(options)
    return {}


def _pairs(router: Any) -> Iterator[tuple[Any, Any]]:
    return iter(router.items() if isinstance(router, Mapping) else router)


def _matches(pattern: Any, name: str) -> bool:
    return bool(pattern.match(name)) if isinstance(pattern, re.Pattern) else fnmatchcase(name, pattern)


def queue_of(conf: Any, exchange: Any, routing_key: Any) -> str:
    for queue in conf.task_queues or ():
        if getattr(queue, "routing_key", None) == routing_key:
            return str(queue.name)
    if exchange is None and routing_key is not None:
        return str(routing_key)
    raise NotCovered(f"exchange={exchange!r}", "Name the queue: queue='…'.")


def annotate(task: Any, conf: Any) -> None:
    """Apply `task_annotations` to a task."""
    annotations = conf.task_annotations
    if not annotations:
        return
    for annotation in annotations if isinstance(annotations, (list, tuple)) else (annotations,):
        if isinstance(annotation, Mapping):
            changes = [annotation.get("*"), annotation.get(task.name)]
        else:
            changes = [annotation.annotate(task), getattr(annotation, "annotate_any", lambda: None)()]
        for change in changes:
            for name, value in (change or {}).items():
                setattr(task, name, value.__get__(task) if callable(value) and name.startswith("on_") else value)
