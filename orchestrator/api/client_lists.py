"""Calls of the Python client that list something: what of it a key may see that is for some queues and workflows only.

Lists that come in pages, and searches, are told where to stay; of others, what is beside is left out of the answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.api.context import Api
from orchestrator.api.reach import has_run, lineage_within
from orchestrator.domain.access import Reach

Narrow = Callable[[Api, Reach, Mapping[str, Any]], Mapping[str, Any]]
"""Returns the arguments that keep a call within reach."""
Keep = Callable[[Reach, Any], Any]
"""Returns what may be seen of an answer."""

_WHOLE_ID = 36
"""Characters."""


def _tasks(api: Api, reach: Reach, given: Mapping[str, Any]) -> Mapping[str, Any]:
    wanted = given["wanted"]
    is_own_run = wanted.run is not None and has_run(api, reach, wanted.run)
    return {"wanted": dataclasses.replace(wanted, within="" if is_own_run else reach.queues)}


def _runs(_: Api, reach: Reach, given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"wanted": dataclasses.replace(given["wanted"], within=reach.workflows)}


def _search(_: Api, reach: Reach, __: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"queues": reach.queues, "workflows": reach.workflows}


def _ids(_: Api, reach: Reach, given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"within": reach.queues if given["kind"] == "task" else reach.workflows}


def _failed(_: Api, reach: Reach, __: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"within": reach.queues}


def _named(_: Api, reach: Reach, __: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"within": reach.workflows}


def _whole_ids(_: Reach, __: Any) -> int:
    """Show ids as a whole: how much of them is enough would say what other ids there are."""
    return _WHOLE_ID


def _queues(reach: Reach, found: Any) -> Any:
    return [one for one in found if reach.has_queue(one.queue)]


def _queue_names(reach: Reach, found: Any) -> Any:
    return [name for name in found if reach.has_queue(name)]


def _of_workflows(reach: Reach, found: Any) -> Any:
    return [one for one in found if reach.has_workflow(one.workflow)]


def _named_workflows(reach: Reach, found: Any) -> Any:
    return [one for one in found if reach.has_workflow(one.name)]


def _workflow_names(reach: Reach, found: Any) -> Any:
    return [name for name in found if reach.has_workflow(name)]


def _counts(reach: Reach, found: Any) -> Any:
    return {name: count for name, count in found.items() if reach.has_workflow(name)}


NARROWED: Mapping[tuple[str, str], Narrow] = {
    ("insights", "page_of_tasks"): _tasks,
    ("insights", "page_of_runs"): _runs,
    ("insights", "search"): _search,
    ("insights", "ids_begin_with"): _ids,
    ("tasks", "preview_retry"): _failed,
    ("flows", "runs"): _named,
    ("schedules", "page"): _named,
}
KEPT: dict[tuple[str, str], Keep] = {
    ("insights", "list_queues"): _queues,
    ("insights", "enough_of_ids"): _whole_ids,
    ("insights", "list_code_workflows"): _named_workflows,
    ("insights", "open_runs"): _of_workflows,
    ("insights", "count_open_others"): _counts,
    ("insights", "runs_under"): _of_workflows,
    ("workflows", "names"): _workflow_names,
    ("workflows", "list_latest"): _named_workflows,
    ("flows", "names"): _named_workflows,
    ("schedules", "list_backfills"): _of_workflows,
    ("queues", "named"): _queue_names,
}

TRIMMED: dict[tuple[str, str], Keep] = {("insights", "lineage"): lineage_within}
"""Answers about one thing, which is looked at before: of what else stands in them, what is beside is left out."""


def is_list(part: str, name: str) -> bool:
    """Say whether a call lists what somebody may see, whoever that is."""
    return (part, name) in NARROWED or (part, name) in KEPT
