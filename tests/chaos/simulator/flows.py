"""Checks that runs of flows agree with a naive interpreter, and that each visit is recorded once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.domain import timezones
from orchestrator.domain.flow.definition import from_plain
from orchestrator.domain.flow.state import FlowState
from orchestrator.domain.ids import derived_id
from orchestrator.store.inbox import RequestKind
from tests.unit.flows.interpreter import Failed, Interpreter
from tests.unit.flows.made import PARAMS, comparable, service

if TYPE_CHECKING:
    from tests.chaos.simulator.world import World

_RUNS = "SELECT id, status, state, cancelling, reason FROM orchestrator.runs WHERE flow ORDER BY id"
_VISITS = "SELECT * FROM orchestrator.node_runs ORDER BY run_id, number"


def check_flows(world: World, ended: dict[bytes, Any]) -> Iterator[str]:
    """Check every run of a flow."""
    visits: dict[bytes, list[Any]] = {run: [] for run in world.clients.flows}
    for visit in world.database.sql(_VISITS):
        visits[visit["run_id"].bytes].append(visit)
    tasks: dict[bytes, set[bytes]] = {run: set() for run in world.clients.flows}
    for task, row in ended.items():
        if row["run_id"] is not None and row["run_id"].bytes in tasks:
            tasks[row["run_id"].bytes].add(task)
    for row in world.database.sql(_RUNS):
        run = row["id"].bytes
        yield from (f"flow {run.hex()} {wrong}" for wrong in _check_visits(row, visits[run], tasks[run]))
        was_retried = (RequestKind.RETRY_RUN, run) in world.clients.requested
        yield from (f"flow {run.hex()} {wrong}" for wrong in _check_end(world, row, visits[run], was_retried))


def _check_visits(row: Any, visits: Sequence[Any], tasks: set[bytes]) -> Iterator[str]:
    """Check that visits are numbered without gaps, and that every task belongs to exactly one visit."""
    if (numbers := [visit["number"] for visit in visits]) != [*range(1, 1 + len(visits))]:
        yield f"has recorded the visits {numbers}"
    called = [
        derived_id(row["id"].bytes, "flow", visit["first_call"] + offset)
        for visit in visits
        for offset in range(visit["calls"])
    ]
    if len({*called}) != len(called):
        yield "has recorded a task with two visits"
    unknown = {*called} ^ tasks if row["status"] != "cancelled" else {*called} - tasks
    if unknown:
        yield f"has tasks that no visit names, or visits whose tasks there are not: {sorted(map(bytes.hex, unknown))}"


def _check_end(world: World, row: Any, visits: Sequence[Any], was_retried: bool) -> Iterator[str]:
    """Check that a flow took the interpreter's path and ended with its result."""
    plain = world.clients.flows[row["id"].bytes]
    naive = Interpreter(service, plain["max_steps"])
    try:
        expected: dict[str, Any] | None = naive.run(from_plain(plain), PARAMS, PARAMS)
    except Failed:
        expected = None
    seen = [(visit["node"], visit["status"]) for visit in visits]
    both = min(len(seen), len(naive.visited))
    if seen[:both] != naive.visited[:both]:
        yield f"has visited {seen}, and the interpreter {naive.visited}"
    if row["status"] == "cancelled" or was_retried:
        return
    if len(seen) < len(naive.visited):
        yield f"has visited {seen}, and the interpreter went on: {naive.visited}"
    if row["status"] != ("failed" if expected is None else "success"):
        yield f"ended as {row['status']} ({row['reason']}), and the interpreter came to {expected}"
    elif expected is not None:
        shared = FlowState.from_plain(timezones.decode(bytes(row["state"]))).shared
        if comparable(shared) != comparable(expected):
            yield f"came to {comparable(shared)}, and the interpreter to {comparable(expected)}"
