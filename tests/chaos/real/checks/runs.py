"""Checks that the counters of runs equal a recount, and that their states match their tasks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from tests.chaos.real.arena import Arena

_ENDED = ("success", "failed", "cancelled", "skipped")
_RECOUNT = """
SELECT run_id, status, count(*) FROM orchestrator.ended_tasks WHERE run_id <> id GROUP BY 1, 2
 UNION ALL
SELECT parent_run, status, count(*) FROM orchestrator.runs
 WHERE code AND parent_run IS NOT NULL AND reason IS DISTINCT FROM 'continued' GROUP BY 1, 2
"""
"""Tasks by run, except those that carry turns of code; and children of code workflows, once per chain."""


def check_runs(arena: Arena) -> Iterator[str]:
    """Check the counters. Tasks that a cancelled or failed DAG never created are counted without rows."""
    recounts: dict[Any, Counter[str]] = defaultdict(Counter)
    for row in arena.sql(_RECOUNT):
        recounts[row["run_id"]][row["status"]] += row["count"]
    for run in arena.sql("SELECT * FROM orchestrator.runs"):
        counted = Counter({status: run[status] for status in _ENDED})
        recount = recounts[run["id"]]
        if run["flow"]:
            recount[run["status"]] += run["started_at"] is not None  # a flow counts its run, too
        uncreated = (
            counted - recount if run["workflow"] is not None and not run["code"] and not run["flow"] else Counter()
        )
        exact = counted == recount + uncreated and not uncreated["success"] and not uncreated["failed"]
        if not exact or run["open"] or run["total"] != counted.total():
            yield f"run {run['id']} counts {dict(counted)} of {run['total']}, and a recount gives {dict(recount)}"
        if run["code"] or run["flow"]:
            continue  # ended by its code or its nodes: journeys.py, flows.py
        expected = "cancelled" if run["cancelling"] else "failed" if run["failed"] else "success"
        if run["status"] != expected and not (run["cancelling"] and run["status"] in _ENDED):
            yield f"run {run['id']} ended as {run['status']}, and its tasks say {expected}"
