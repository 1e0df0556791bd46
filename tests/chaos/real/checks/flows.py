"""Runs of flows went where their flow leads, called every task once, and were told the truth."""

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
    """Judge every run of a flow by its tasks and the visits that are recorded."""
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
    """Each visit is recorded once, in order, and each task belongs to one."""
    numbers, nodes = [visit["number"] for visit in visits], tuple(visit["node"] for visit in visits)
    if numbers != [*range(1, 1 + len(visits))]:
        yield f"has recorded the visits {numbers}"
    if run["status"] != "failed" and nodes != VISITS[: len(nodes)]:
        yield f"has visited {nodes}"
    called = Counter(
        derived_id(UUID(run["id"]).bytes, "flow", visit["first_call"] + place)
        for visit in visits
        for place in range(visit["calls"])
    )
    there = {UUID(task["id"]).bytes for task in tasks}
    if called.keys() - there or (run["status"] == "success" and there != called.keys()) or called.total() > len(called):
        yield f"has recorded {called.total()} tasks with its visits, and there are {len(there)}"


def _check_success(run: dict[str, Any], visits: Sequence[Any], tasks: Sequence[Any]) -> Iterator[str]:
    """It has gone all the way, and what stands in its shared state is what its tasks gave."""
    if len(visits) != len(VISITS):
        yield f"has succeeded after the visits {[visit['node'] for visit in visits]}"
    given: dict[str, list[str]] = defaultdict(list)
    for task in sorted(tasks, key=lambda task: (task["step"], task["position"], task["created_at"])):
        given[task["step"].removeprefix("flow:")].append(token_of(task["result"]))
    shared = FlowState.from_plain(timezones.decode(bytes(run["state"]))).shared
    heard = {
        "count": shared["count"]["token"],
        "beside": [one["token"] for one in shared["beside"]],
        "each": [one["token"] for one in shared["each"]],
        "inner/own": [shared["inner"]["own"]["token"]],
    }
    rounds = given.pop("count", [])
    if len(rounds) != ROUNDS or shared["count"]["number"] != ROUNDS or heard.pop("count") not in rounds:
        yield f"went round with {rounds}, and has {shared['count']}"
    if len(given["beside"]) != BESIDE or len(given["each"]) != len(run["params"]["items"]):
        yield f"has the tasks {dict(given)}"
    if {step: tokens for step, tokens in heard.items() if tokens} != {step: own for step, own in given.items() if own}:
        yield f"was told {heard}, and its tasks gave {dict(given)}"
