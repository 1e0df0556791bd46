"""Checks that tasks known to one release only ended there, and did not circulate among other workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tests.chaos.real.arena import Arena
from tests.chaos.real.checks.rows import shown, token_of, value_of
from tests.chaos.real.project.releases import OF_RELEASE, STAGES, own_stages

_MAX_DISPATCHES = 5
"""Dispatches of a task without lost attempts, at most: each may reach a worker that has just stopped. If ordinary tasks
were dispatched more often, because Redis and workers restarted, two more than their maximum are allowed."""
_RUNS = """
SELECT r.id::text, r.version, r.status, r.stuck, t.name <> r.workflow AS pinned, t.result, t.error
  FROM orchestrator.runs r LEFT JOIN orchestrator.ended_tasks t ON t.id = r.id
 WHERE r.workflow = 'relay'
"""
_STARTS = "SELECT task::text, count(*) AS number FROM chaos.starts GROUP BY 1"
_LOST = "SELECT task_id::text AS task, count(*) AS number FROM orchestrator.attempts WHERE outcome = 'lost' GROUP BY 1"


def check_releases(arena: Arena, ended: dict[str, Any]) -> Iterator[str]:
    """Check the tasks of each release, and the runs of each version."""
    lost = {row["task"]: row["number"] for row in arena.sql(_LOST)}
    starts = {row["task"]: row["number"] for row in arena.sql(_STARTS)}
    dispatches = {task: starts.get(task, 0) - lost.get(task, 0) for task in ended}
    max_dispatches = max((dispatches[task] for task, row in ended.items() if OF_RELEASE not in row["name"]), default=0)
    for task, row in ended.items():
        if OF_RELEASE in row["name"]:
            if row["status"] != "success" and (row["error"] or {}).get("kind") != "WorkerLost":
                yield f"a task that only one release knows did not succeed: {shown(row)}"
            if dispatches[task] > max(_MAX_DISPATCHES, max_dispatches + 2):
                yield f"a task that only one release knows was handed out {starts[task]} times: {shown(row)}"
    yield from _check_relays(arena, ended)


def _check_relays(arena: Arena, ended: dict[str, Any]) -> Iterator[str]:
    """Check that every run completed each stage in one task, and that a pinned run executed its version's code."""
    ran: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for run, name, task in arena.journal.of_tasks("stage"):
        ran[run][name].add(task)
    failing = {str(row["run_id"]) for row in ended.values() if row["status"] == "failed" and row["id"] != row["run_id"]}
    for row in arena.sql(_RUNS):
        if row["status"] != "success":
            if row["id"] not in failing:
                yield f"a run of version {row['version']} did not succeed: {shown(row)}"
            continue
        result = value_of(row["result"])
        if row["pinned"] and result["release"] != row["version"]:
            yield f"run {row['id']} is held to version {row['version']}, and ran the code of {result['release']}"
        expected = own_stages(row["version"]) if row["pinned"] else STAGES
        tasks_by_stage = {name: {token.partition("/")[0]} for name, token in result["tokens"].items()}
        if tasks_by_stage != ran[row["id"]] or sorted(tasks_by_stage) != sorted(expected):
            yield f"run {row['id']} was told of {tasks_by_stage}; {dict(ran[row['id']])} ran, {expected} should have"
        for token in result["tokens"].values():
            if token != token_of(ended[token.partition("/")[0]]["result"]):
                yield f"run {row['id']} was told {token}, which is not what its task returned"
