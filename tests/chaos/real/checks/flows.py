"""Checks that runs of flows followed their edges, called every task once, and received the results."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID

from orchestrator.domain import timezones
from orchestrator.domain.flow.state import FlowState
from orchestrator.domain.ids import derived_id
from tests.chaos.real.arena import Arena
from tests.chaos.real.checks.rows import token_of
from tests.chaos.real.project.flows import BESIDE, ROUNDS, VISITS

_RUNS = "SELECT id, status, reason, stuck, params, state FROM orchestrator.runs WHERE workflow = 'errands'"
_VISITS = "SELECT run_id, number, node, first_call, calls FROM orchestrator.node_runs ORDER BY run_id, number"


def check_flows(arena: Arena, ended: dict[str, Any]) -> Iterator[str]:
    """Check every run of a flow by its tasks and its recorded visits."""
    cancelled = {run for (run,) in arena.journal.of_clients("cancel")}
    visits: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for visit in arena.sql(_VISITS):
        visits[visit["run_id"]].append(visit)
    tasks: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in ended.values():
        if row["run_id"] is not None:
            tasks[row["run_id"]].append(row)
    for run in arena.sql(_RUNS):
        found = [*_check_visits(run, visits[run["id"]], tasks[run["id"]])]
        if run["status"] == "success":
            found += _check_success(run, visits[run["id"]], tasks[run["id"]])
        elif run["status"] == "cancelled" and run["id"] not in cancelled:
            found.append("was cancelled, and by nobody")
        elif run["status"] == "failed" and not any(task["status"] == "failed" for task in tasks[run["id"]]):
            found.append(f"failed, and none of its tasks did: {run['reason']}, {run['stuck']}")
        yield from (f"flow {run['id']} {wrong}" for wrong in found)


def _check_visits(run: dict[str, Any], visits: Sequence[Any], tasks: Sequence[Any]) -> Iterator[str]:
    """Check that each visit is recorded once and in order, and that each task belongs to one visit."""
    numbers, nodes = [visit["number"] for visit in visits], tuple(visit["node"] for visit in visits)
    if numbers != [*range(1, 1 + len(visits))]:
        yield f"has recorded the visits {numbers}"
    if run["status"] != "failed" and nodes != VISITS[: len(nodes)]:
        yield f"has visited {nodes}"
    called = Counter(
        derived_id(UUID(run["id"]).bytes, "flow", visit["first_call"] + offset)
        for visit in visits
        for offset in range(visit["calls"])
    )
    existing = {UUID(task["id"]).bytes for task in tasks}
    if (
        called.keys() - existing
        or (run["status"] == "success" and existing != called.keys())
        or called.total() > len(called)
    ):
        yield f"has recorded {called.total()} tasks with its visits, and there are {len(existing)}"


def _check_success(run: dict[str, Any], visits: Sequence[Any], tasks: Sequence[Any]) -> Iterator[str]:
    """Check that a successful run visited all nodes, and that its shared state holds the results of its tasks."""
    if len(visits) != len(VISITS):
        yield f"has succeeded after the visits {[visit['node'] for visit in visits]}"
    results: dict[str, list[str]] = defaultdict(list)
    for task in sorted(tasks, key=lambda task: (task["step"], task["position"], task["created_at"])):
        results[task["step"].removeprefix("flow:")].append(token_of(task["result"]))
    shared = FlowState.from_plain(timezones.decode(bytes(run["state"]))).shared
    received = {
        "count": shared["count"]["token"],
        "beside": [item["token"] for item in shared["beside"]],
        "each": [item["token"] for item in shared["each"]],
        "inner/own": [shared["inner"]["own"]["token"]],
    }
    rounds = results.pop("count", [])
    if len(rounds) != ROUNDS or shared["count"]["number"] != ROUNDS or received.pop("count") not in rounds:
        yield f"went round with {rounds}, and has {shared['count']}"
    if len(results["beside"]) != BESIDE or len(results["each"]) != len(run["params"]["items"]):
        yield f"has the tasks {dict(results)}"
    if {step: tokens for step, tokens in received.items() if tokens} != {
        step: own for step, own in results.items() if own
    }:
        yield f"was told {received}, and its tasks gave {dict(results)}"
