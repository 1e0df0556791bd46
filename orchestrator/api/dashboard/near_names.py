"""Names that are like one for which a list has nothing: filters compare whole names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

import msgspec

from orchestrator.api.context import Api
from orchestrator.domain.access import KeyScope
from orchestrator.domain.fleet.announced import tasks_among, workflows_among
from orchestrator.store.insights import TaskFilter, list_queues, page_of_tasks
from orchestrator.store.insights.lookup import kinds_of_names
from orchestrator.store.insights.runs import workflows_with_runs

_MOST = 10
_MOST_TASKS = 500
"""Tasks of like names that are looked at."""


class Near(msgspec.Struct, frozen=True):
    """The filter of a list that no name fits, and names that it may mean."""

    field: str
    noun: str
    text: str
    names: list[str]
    is_part: bool
    """The names contain the text; else they are spelled like it."""


def near_task_filters(api: Api, name: str | None, queue: str | None, key_scope: KeyScope) -> list[Near]:
    """Return which of the filters of an empty list of tasks name nothing."""
    found = [_near("name", "task", name, _task_names(api, name, key_scope))] if name else []
    if queue:
        known = (one.queue for one in api.read_list(list_queues, key_scope.queues))
        found.append(_near("queue", "queue", queue, known))
    return [one for one in found if one is not None]


def near_run_filters(api: Api, workflow: str | None, key_scope: KeyScope) -> list[Near]:
    """Return which of the filters of an empty list of runs name nothing."""
    known = api.read_list(workflows_with_runs, key_scope.workflows) if workflow else []
    found = _near("workflow", "workflow", workflow, known) if workflow else None
    return [] if found is None else [found]


def _task_names(api: Api, text: str, key_scope: KeyScope) -> set[str]:
    """Return names of recent tasks that contain a text, and of those that workers have: not for a bound key."""
    wanted = TaskFilter(part=text, within=key_scope.queues)
    found = {task.name for task in api.read_list(page_of_tasks, wanted, limit=_MOST_TASKS).tasks}
    if not key_scope.is_bound:
        known = api.read_list(kinds_of_names)
        found |= {*tasks_among(known), *workflows_among(known)}
    return found


def _near(field: str, noun: str, text: str, known: Iterable[str]) -> Near | None:
    names = {*known}
    if text in names:
        return None
    parts = sorted((name for name in names if text.lower() in name.lower()), key=lambda name: (len(name), name))
    return Near(field, noun, text, parts[:_MOST] or get_close_matches(text, names, n=3), bool(parts))
