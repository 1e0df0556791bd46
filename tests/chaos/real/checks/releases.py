"""What only one release of the application knows came to its end there, and went round among the others nowhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tests.chaos.real.arena import Arena
from tests.chaos.real.checks.rows import shown, token_of, value_of
from tests.chaos.real.project.releases import OF_RELEASE, STAGES, own_stages

_HANDFUL = 5
"""Times that a task is handed out, beside attempts that are lost: each may meet a worker that has just gone. Where what
everybody knows was handed out more often, because Redis and workers came and went, so may this be, and twice more."""
_RUNS = """
SELECT r.id::text, r.version, r.status, r.stuck, t.name <> r.workflow AS pinned, t.result, t.error
  FROM orchestrator.runs r LEFT JOIN orchestrator.ended_tasks t ON t.id = r.id
 WHERE r.workflow = 'relay'
"""
_STARTS = "SELECT task::text, count(*) AS number FROM chaos.starts GROUP BY 1"
_LOST = "SELECT task_id::text AS task, count(*) AS number FROM orchestrator.attempts WHERE outcome = 'lost' GROUP BY 1"


def check_releases(arena: Arena, ended: dict[str, Any]) -> Iterator[str]:
    """Judge the tasks of each release, and the runs of each version."""
    lost = {row["task"]: row["number"] for row in arena.sql(_LOST)}
    starts = {row["task"]: row["number"] for row in arena.sql(_STARTS)}
    handed_out = {task: starts.get(task, 0) - lost.get(task, 0) for task in ended}
    often = max((handed_out[task] for task, row in ended.items() if OF_RELEASE not in row["name"]), default=0)
    for task, row in ended.items():
        if OF_RELEASE in row["name"]:
            if row["status"] != "success" and (row["error"] or {}).get("kind") != "WorkerLost":
                yield f"a task that only one release knows did not succeed: {shown(row)}"
            if handed_out[task] > max(_HANDFUL, often + 2):
                yield f"a task that only one release knows was handed out {starts[task]} times: {shown(row)}"
    yield from _check_relays(arena, ended)


def _check_relays(arena: Arena, ended: dict[str, Any]) -> Iterator[str]:
    """Every run went through its stages, each in one task; one that is held to a version had its code."""
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
        told = {name: {token.partition("/")[0]} for name, token in result["tokens"].items()}
        if told != ran[row["id"]] or sorted(told) != sorted(expected):
            yield f"run {row['id']} was told of {told}; {dict(ran[row['id']])} ran, {expected} should have"
        for token in result["tokens"].values():
            if token != token_of(ended[token.partition("/")[0]]["result"]):
                yield f"run {row['id']} was told {token}, which is not what its task returned"
