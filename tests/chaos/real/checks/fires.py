"""Checks that schedules fired as their policies say: no time twice, and no due time omitted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from typing import Any

from tests.chaos.real.arena import Arena
from tests.chaos.real.project import app

_RUNS = """
SELECT id::text, status, schedule, extract(epoch FROM fire_time)::int AS fire, created_at, started_at, ended_at
  FROM orchestrator.runs WHERE schedule IS NOT NULL ORDER BY fire_time, id
"""
_SCHEDULES = """
SELECT workflow, workflow || '/' || name AS key, coalesce(definition ->> 'overlap', 'skip') AS overlap,
       (definition ->> 'every')::double precision AS every, fired, skipped, error
  FROM orchestrator.schedules
"""


def check_fires(arena: Arena) -> Iterator[str]:
    """Compare the runs of each schedule with the due times between its first fire and its end."""
    bounds: dict[str, dict[str, int]] = defaultdict(dict)
    for name, bound, at in arena.journal.of_clients("schedule"):
        bounds[name][bound] = int(at)
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in arena.sql(_RUNS):
        runs[run["schedule"]].append(run)
    found = arena.sql(_SCHEDULES)
    if {schedule["workflow"] for schedule in found} != app.schedules._declared.keys():
        yield f"schedules are missing: {found}"
    for schedule in found:
        limits = bounds[schedule["workflow"]]
        if "next" in limits:
            due = range(limits["first"], limits["next"], int(schedule["every"]))
            yield from _check_schedule(schedule, due, runs[schedule["key"]])
    yield from _check_written(arena, runs)


def _check_schedule(schedule: dict[str, Any], due: range, runs: list[dict[str, Any]]) -> Iterator[str]:
    key = schedule["key"]
    fires = Counter(run["fire"] for run in runs)
    if schedule["error"] is not None:
        yield f"schedule {key} could not fire: {schedule['error']}"
    if repeated := [fire for fire, number in fires.items() if number > 1]:
        yield f"schedule {key} fired more than once for {repeated}"
    if unexpected := fires.keys() - set(due):
        yield f"schedule {key} fired for {sorted(unexpected)}, which are not among its times, {due}"
    left_out = [fire for fire in due if fire not in fires]
    if schedule["overlap"] == "skip":
        counted, recount = (schedule["fired"], schedule["skipped"]), (len(fires), len(left_out))
        if counted != recount:
            yield f"schedule {key} counts {counted} fired and skipped, and a recount gives {recount}"
    elif left_out:
        yield f"schedule {key} did not fire for {left_out}"
    since = {"skip": "created_at", "queue": "started_at"}.get(schedule["overlap"])
    for before, after in pairwise(runs):
        if since is not None and None not in (before["ended_at"], after[since]) and before["ended_at"] > after[since]:
            yield f"schedule {key}: run {after['id']} began at {after[since]}, before the end of {before['id']}"


def _check_written(arena: Arena, runs: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Check that every successful run has run one task, for its fire time."""
    written: dict[tuple[str, int], set[str]] = defaultdict(set)
    for name, due, task in arena.journal.of_tasks("fire"):
        written[name, int(datetime.fromisoformat(due).timestamp())].add(task)
    for key, found in runs.items():
        for run in found:
            tasks = written[key.partition("/")[0], run["fire"]]
            if run["status"] == "success" and len(tasks) != 1:
                yield f"run {run['id']} of {key} for {run['fire']}: {len(tasks)} tasks wrote that they ran for it"
