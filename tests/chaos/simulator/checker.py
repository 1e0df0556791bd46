"""Checks a simulation at rest, with only the database, its audit table, and the log of executions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from orchestrator.domain import timezones
from orchestrator.domain.code.history import SignalReceived
from orchestrator.domain.dag.graph import Graph
from orchestrator.domain.dag.state import DagState, StepState
from orchestrator.domain.flow.definition import is_node
from orchestrator.domain.flow.state import FlowState
from orchestrator.domain.runs import RunChanges, RunCounters, verdict
from orchestrator.domain.states import ENDED_TASK_STATES, TASK_TRANSITIONS
from orchestrator.store.runs.pending_changes import decode_changes
from tests.chaos.simulator.clients import DAG, SCARCE, WIDE
from tests.chaos.simulator.flows import check_flows
from tests.chaos.simulator.limits import check_limits, check_scarce

if TYPE_CHECKING:
    from tests.chaos.simulator.world import World

_ALLOWED = {(str(transition.source), str(transition.target)) for transition in TASK_TRANSITIONS}
_ENDED = {str(state) for state in ENDED_TASK_STATES}
_GRAPHS = {definition.name: Graph(definition) for definition in (DAG, WIDE, SCARCE)}
_GRAPH_OF = {step.name: graph for graph in _GRAPHS.values() for step in graph.steps}
"""The graph of each step: step names are unique across definitions."""


def check(world: World) -> list[str]:
    """Return all violations."""
    ended = {row["id"].bytes: row for row in world.database.sql("SELECT * FROM orchestrator.ended_tasks")}
    audit = world.database.sql("SELECT * FROM simulated.audit ORDER BY number")
    return [
        *_check_rest(world),
        *_check_ends(world, ended),
        *_check_executions(world, ended),
        *_check_ledger(world, ended),
        *_check_transitions(audit),
        *_check_order(audit),
        *_check_runs(world, ended),
        *check_flows(world, ended),
        *check_limits(world, audit),
        *check_scarce(world),
    ]


def _check_rest(world: World) -> Iterator[str]:
    for table in ("tasks", "inbox", "untold", "timers"):
        for row in world.database.sql(f"SELECT * FROM orchestrator.{table}"):
            if table != "untold" or not _is_kept_signal(world, row):
                yield f"left in {table}: {dict(row)}"
    for row in world.database.sql("SELECT * FROM orchestrator.runs WHERE ended_at IS NULL OR expanding"):
        yield f"a run has not ended: {dict(row)}"
    for leftover in world.left_over():
        yield f"left in the streams: {leftover}"
    for row in world.database.sql("SELECT * FROM orchestrator.runs WHERE stuck IS NOT NULL"):
        yield f"a run is stuck: {dict(row)}"
    for entry, error in (item for redis in world.redis for item in redis.data.quarantine):
        if not (entry.startswith("inbox/") and world.poisons.met):
            yield f"a report was set aside: {entry}: {error}"
    for worker in world.workers:
        if not worker.is_idle:
            yield f"{worker.child.id} still holds something"


def _is_kept_signal(world: World, row: Any) -> bool:
    """Return whether pending changes are only signals to a poisoned flow, which keeps them for a retry."""
    run = row["run_id"].bytes
    changes = decode_changes(bytes(row["body"]))
    signals = RunChanges(facts=changes.facts, of_flow=True)
    return (
        row["held"]
        and run in world.clients.flows
        and run in world.poisons.met
        and changes == signals
        and all(isinstance(fact, SignalReceived) for fact in changes.facts)
    )


def _check_ends(world: World, ended: dict[bytes, Any]) -> Iterator[str]:
    """Check that every committed task has ended."""
    for task in world.clients.tasks:
        if task not in ended:
            yield f"task {task.hex()} was enqueued and has no end"
    for task, row in ended.items():
        if row["status"] not in _ENDED:
            yield f"task {task.hex()} ended as {row['status']}"


def _check_executions(world: World, ended: dict[bytes, Any]) -> Iterator[str]:
    """Check that every success was executed in the recorded attempt, and that failures are counted correctly."""
    by_attempt = defaultdict(list)
    by_task = defaultdict(list)
    for execution in world.executions:
        by_attempt[execution.task, execution.attempt].append(execution)
        by_task[execution.task].append(execution)
        if len(by_attempt[execution.task, execution.attempt]) > 1:
            yield f"attempt {execution.attempt} of task {execution.task.hex()} ran twice"
    for task, row in ended.items():
        if row["status"] == "success":
            found = [execution for execution in by_attempt[task, row["attempt"]] if execution.outcome == "success"]
            if not found:
                yield f"task {task.hex()} succeeded in attempt {row['attempt']}, which nobody has run to its end"
            elif (row["worker"] or found[0].worker, bytes(row["result"])) != (found[0].worker, found[0].result):
                yield f"task {task.hex()} has the result of another execution than {found[0]}"
            else:
                for child in (*found[0].promised, *found[0].children):
                    if child not in ended:
                        yield f"task {child.hex()}, enqueued by a task that succeeded, does not exist"
        elif row["status"] == "failed":
            outcomes = Counter(execution.outcome for execution in by_task[task])
            if row["failures"] > outcomes["failed"] + outcomes["aborted"]:
                yield f"task {task.hex()} is charged {row['failures']} failures of {outcomes['failed']}"
            if row["reason"] == "worker lost" and row["losses"] < world.settings.loss_limit:
                yield f"task {task.hex()} failed of {row['losses']} losses"
            if row["reason"] == "worker lost" and row["name"] != "poison":
                yield f"task {task.hex()} failed because its workers died, and it killed none"
    for (task, attempt), executions in by_attempt.items():
        if (
            task in ended
            and executions[0].promised
            and (ended[task]["status"], ended[task]["attempt"]) != ("success", attempt)
        ):
            for child in executions[0].promised:
                if child in ended:
                    yield f"task {child.hex()} exists, though attempt {attempt} of its parent did not count"


def _check_ledger(world: World, ended: dict[bytes, Any]) -> Iterator[str]:
    """Check that a task that completes in a transaction wrote once, in its successful attempt only."""
    written: dict[bytes, list[int]] = defaultdict(list)
    for line in world.database.sql("SELECT * FROM simulated.ledger"):
        written[line["id"].bytes].append(line["attempt"])
    for task, row in ended.items():
        expected = [row["attempt"]] if row["name"] == "exact" and row["status"] == "success" else []
        if written[task] != expected:
            yield f"task {task.hex()} {row['status']} in attempt {row['attempt']}, and wrote in {written[task]}"


def _check_transitions(audit: list[Any]) -> Iterator[str]:
    """Check that all state changes are in the table of transitions, and that the fence never decreases."""
    state: dict[bytes, tuple[str, int]] = {}
    for row in audit:
        task = row["id"].bytes
        name = f"task {task.hex()} (audit {row['number']})"
        before, fence = state.get(task, (None, 0))
        if row["operation"].startswith("leave"):
            if (row["before"], row["attempt_before"]) != (before, fence):
                yield f"{name} left as {row['before']}, but was {before}"
            continue
        after, attempt = row["after"], row["attempt"]
        if row["operation"] == "enter ended_tasks" and (before, fence) == (after, attempt):
            continue  # the task moved from a closed shard
        if before is None and after == "dispatched":
            before = "pending"  # the creating tick has also claimed it
        if before is None:
            if after != "pending" or attempt != 0:
                yield f"{name} was created {after} with attempt {attempt}"
        elif (before, after) not in _ALLOWED:
            yield f"{name} went from {before} to {after}"
        elif attempt != fence + (after == "dispatched"):
            yield f"{name} went from {before} to {after} with attempt {attempt} after {fence}"
        state[task] = (after, attempt)


def _check_order(audit: list[Any]) -> Iterator[str]:
    """Check that the tasks of a DAG step are created only after all upstream tasks have ended."""
    states: dict[tuple[bytes, str], dict[bytes, str]] = defaultdict(dict)
    for row in audit:
        if row["step"] is None or is_node(row["step"]) or row["operation"].startswith("leave"):
            continue
        run, step, task = row["run_id"].bytes, row["step"], row["id"].bytes
        if task not in states[run, step]:
            graph = _GRAPH_OF[step]
            for position in graph.upstream[graph.index[step]]:
                upstream = graph.steps[position].name
                unfinished = [other for other, state in states[run, upstream].items() if state not in _ENDED]
                if unfinished:
                    yield f"step {step} of run {run.hex()} began before {upstream} had ended"
        states[run, step][task] = row["after"]


def _check_runs(world: World, ended: dict[bytes, Any]) -> Iterator[str]:
    """Check that the counters of runs equal a recount, and that their states match the counters."""
    tasks = defaultdict(list)
    for row in ended.values():
        if row["run_id"] is not None:
            tasks[row["run_id"].bytes].append(row)
    runs = {row["id"].bytes: row for row in world.database.sql("SELECT * FROM orchestrator.runs")}
    for run in world.clients.runs:
        if run not in runs:
            yield f"run {run.hex()} is gone"
    for run, row in runs.items():
        recount = Counter(task["status"] for task in tasks[run])
        if row["flow"]:
            recount += _own_counts(row)
        elif row["workflow"] is not None:
            recount += _counts_without_tasks(row, tasks[run])
        counted = {name: row[name] for name in ("success", "failed", "cancelled", "skipped")}
        if counted != {name: recount[name] for name in counted} or row["total"] != sum(counted.values()):
            yield f"run {run.hex()} counts {counted} of {row['total']}, and a recount gives {dict(recount)}"
        counters = RunCounters(total=row["total"], open=row["open"], **counted)
        expected = verdict(counters, row["cancelling"])
        if row["status"] != expected and not row["flow"]:
            yield f"run {run.hex()} ended as {row['status']}, and its tasks say {expected}"


def _own_counts(row: Any) -> Counter[str]:
    """Return the counts of a flow's run itself. A run that fails while it is being cancelled counts as failed.

    A run that is cancelled while stuck before its start counts nothing.
    """
    state = None if row["state"] is None else FlowState.from_plain(timezones.decode(bytes(row["state"])))
    if row["status"] != "cancelled":
        return Counter({str(row["status"]): int(row["started_at"] is not None)})
    if state is None or not (state.frames or state.is_over):
        return Counter()
    return Counter({"cancelled" if state.error is None else "failed": 1})


def _counts_without_tasks(row: Any, tasks: list[Any]) -> Counter[str]:
    """Return a DAG's counts that belong to no task: skipped steps, and items that were never created."""
    if row["state"] is None:
        return Counter()
    state = msgspec.msgpack.decode(bytes(row["state"]), type=DagState)
    created = Counter(task["step"] for task in tasks)
    found: Counter[str] = Counter()
    for position, step in enumerate(_GRAPHS[row["workflow"]].steps):
        fan = state.fans.get(position)
        missing = (fan.total if fan is not None else 1) - created[step.name]
        if missing:
            ended_as = "cancelled" if fan is not None else StepState(state.steps[position]).name.lower()
            if ended_as == "waiting" and row["status"] == "cancelled":
                ended_as = "cancelled"  # the run was cancelled while stuck, before its planner skipped the step
            found[ended_as] += missing
    return found
