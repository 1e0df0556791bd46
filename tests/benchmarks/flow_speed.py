"""Ten steps one after another, as a flow, as a DAG and as code: how fast, and what they cost; and one long loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

from sqlalchemy import text

from orchestrator import Orchestrator
from orchestrator.domain import timezones
from orchestrator.domain.code import history
from orchestrator.domain.flow.state import FlowState
from orchestrator.sdk.backend import Backend
from orchestrator.sdk.backend.connections import Connections
from orchestrator.sdk.dag import definitions
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.values.payload import encode_call
from orchestrator.store.code import runs as code_runs
from orchestrator.store.dag import plans as dags
from orchestrator.store.dag import workflows
from orchestrator.store.flow import runs as flow_runs
from orchestrator.store.runs import creation
from orchestrator.store.runs.creation import NewRun

PROGRAM = """
from orchestrator import Orchestrator, WorkflowContext

app = Orchestrator()


@app.task
def step(value: int | None = None) -> int:
    return (value or 0) + 1


@app.workflow
async def ten_of_code(ctx: WorkflowContext, value: int) -> int:
    for _ in range(10):
        value = await step.schedule(value)
    return value
"""
STEPS = 10
PATIENCE = 600.0
WINDOW = 100
"""Steps of the loop, at its beginning and at its end, whose cost is compared."""
KINDS = ("flow", "DAG", "code")


class Stack(Protocol):
    """What is measured."""

    app: Orchestrator

    def cpu(self) -> float:
        """Return the seconds of CPU that the scheduler has used."""

    def others(self) -> dict[str, float]:
        """Return those that the other processes have used."""


def thread_time(pid: int) -> float:
    """Return the seconds of CPU that a process has used, to the microsecond: its living threads alone."""
    spent = 0
    for folder in Path(f"/proc/{pid}/task").iterdir():
        spent += int((folder / "schedstat").read_text().split()[0])
    return spent / 1e9


Make = Callable[[], NewRun]


def _links(app: Orchestrator) -> Connections:
    backend = app._client.backend
    assert isinstance(backend, Backend)
    return backend.connections


def publish(app: Orchestrator) -> dict[str, Make]:
    """Store the same ten steps as a flow and as a DAG; return what makes a run of each kind."""
    nodes: dict[str, Any] = {}
    for number in range(STEPS):
        given = "$params.value" if number == 0 else "$shared.value"
        nodes[f"s{number}"] = {
            "exec_type": "local_func",
            "func": "load.step",
            "prep": {"input_map": {"value": given}},
            "post": {"output_key": "value"},
        }
    edges = [{"from": f"s{number}", "to": f"s{number + 1}"} for number in range(STEPS - 1)]
    version = app.flows.publish("ten-of-flow", {"start": "s0", "nodes": nodes, "edges": edges})
    tasks: dict[str, Any] = {"s0": {"task": "load.step", "input": {"value": "${params.value}"}}}
    for number in range(1, STEPS):
        before = f"s{number - 1}"
        tasks[f"s{number}"] = {
            "task": "load.step",
            "depends_on": [before],
            "input": {"value": f"${{{before}}}"},
        }
    app.workflows.apply(
        definitions.from_data({"name": "ten-of-dag", "params": {"value": {"type": "integer"}}, "tasks": tasks})
    )

    with _links(app).reading() as connection:
        stored = workflows.latest(connection, "ten-of-dag")
    assert stored is not None
    definition, number = stored.definition, stored.version
    payload = encode_call("ten-of-code", (), {"value": 0}, 1_000_000)
    started = history.RunStarted("load.ten_of_code", 1, payload, "default")
    return {
        "flow": lambda: flow_runs.new_run("ten-of-flow", version, new_id(), {"value": 0}),
        "DAG": lambda: dags.new_run(definition, number, new_id(), {"value": 0}),
        "code": lambda: code_runs.new_run(new_id(), [started]),
    }


def crowd(stack: Stack, runs: int, rounds: int) -> dict[str, Any]:
    """Let runs of each kind take turns; return runs a second and milliseconds of CPU a run, medians of the rounds.

    They are created in one transaction, so that it is the engine that is measured, and not who starts them.
    """
    made = publish(stack.app)
    for kind in KINDS:
        _round(stack, made[kind], max(10, runs // 10))  # everything is loaded and planned
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind in KINDS:
            found[kind].append(_round(stack, made[kind], runs))
    report: dict[str, Any] = {"runs": runs, "steps of each": STEPS, "rounds": rounds}
    for kind, measured in found.items():
        report[kind] = {name: round(median(one[name] for one in measured), 2) for name in measured[0]}
        report[kind]["runs/s of each round"] = [round(one["runs/s"]) for one in measured]
    for kind in KINDS[1:]:
        report[f"flow / {kind}"] = {
            name: round(report["flow"][name] / report[kind][name], 2) for name in ("runs/s", "scheduler, ms of CPU")
        }
    return report


def _round(stack: Stack, make: Make, number: int) -> dict[str, float]:
    links = _links(stack.app)
    used, others = stack.cpu(), stack.others()
    with links.writing("the runs were stored", transaction=True) as connection:
        new = [make() for _ in range(number)]
        creation.create(connection, new)
    links.nudge()
    ids = [run.id.hex() for run in new]
    deadline = time.monotonic() + PATIENCE
    while True:
        with links.reading() as connection:
            row = connection.execute(_ENDED, {"ids": ids}).one()
        if row.ended == number:
            break
        if time.monotonic() > deadline:
            raise TimeoutError(f"{row.ended} of {number} runs have ended after {PATIENCE:g} s")
        time.sleep(0.1)
    if row.good != number:
        raise AssertionError(f"{number - row.good} of {number} runs did not succeed")
    spent = {"scheduler": stack.cpu() - used}
    spent |= {name: now - others[name] for name, now in stack.others().items()}
    cost = {f"{name}, ms of CPU": 1000 * seconds / number for name, seconds in spent.items()}
    return {"runs/s": number / row.seconds, **cost}


_ENDED = text("""
SELECT count(ended_at) AS ended, count(*) FILTER (WHERE status = 'success') AS good,
       extract(epoch FROM max(ended_at) - min(created_at))::float AS seconds
  FROM orchestrator.runs WHERE id = ANY(cast(:ids AS uuid[]))
""")


# -- a loop


def loop(stack: Stack, steps: int) -> dict[str, Any]:
    """Let one run go round and round; return milliseconds of CPU a step at its beginning and end, and its row's size.

    Every other step is a task; those between are choices that lead back.
    """
    lead_back = {"action": "again", "expr": {"lt": ["$shared.value", steps // 2]}}
    nodes = {
        "work": {
            "exec_type": "local_func",
            "func": "load.step",
            "prep": {"input_map": {"value": "$shared.value"}},
            "post": {"output_key": "value"},
        },
        "more": {"kind": "choice", "choice_cases": [lead_back], "default_action": "done"},
    }
    edges = [{"from": "work", "to": "more"}, {"from": "more", "action": "again", "to": "work"}]
    stack.app.flows.publish("loop", {"start": "work", "nodes": nodes, "edges": edges})
    run = stack.app.flows["loop"].start()
    seen = [Seen(0, 0.0, 0.0, 0)]
    began, used, deadline = time.monotonic(), stack.cpu(), time.monotonic() + PATIENCE
    while seen[-1].steps < steps:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{seen[-1].steps:,} of {steps:,} steps after {PATIENCE:g} s")
        with _links(stack.app).reading() as connection:
            row = connection.execute(_ROW, {"id": run.id}).one()
        plain = None if row.state is None else timezones.decode(bytes(row.state))
        taken = FlowState() if plain is None else FlowState.from_plain(plain)
        seen.append(Seen(taken.steps, stack.cpu() - used, time.monotonic() - began, row.bytes))
        time.sleep(0.02)
    found: dict[str, Any] = {"steps": seen[-1].steps}
    for first in (WINDOW, steps // 2, steps - WINDOW):
        cpu, seconds = (_at(seen, first + WINDOW, name) - _at(seen, first, name) for name in ("cpu", "seconds"))
        size = max(one.bytes for one in seen if one.steps <= first + WINDOW)
        found[f"steps {first:,} to {first + WINDOW:,}"] = {
            "scheduler, ms of CPU a step": round(1000 * cpu / WINDOW, 3),
            "ms a step": round(1000 * seconds / WINDOW, 2),
            "largest row so far, bytes": size,
        }
    return found


class Seen(NamedTuple):
    """One look at the loop."""

    steps: int
    cpu: float
    seconds: float
    bytes: int


_ROW = text("SELECT state, pg_column_size(r.*) AS bytes FROM orchestrator.runs r WHERE id = cast(:id AS uuid)")


def _at(seen: Sequence[Seen], steps: int, name: str) -> float:
    """Return what had been used when so many steps had been taken, between the looks before and after that."""
    place = next(place for place, one in enumerate(seen) if one.steps >= steps)
    before, after = seen[max(0, place - 1)], seen[place]
    share = 1.0 if after.steps == before.steps else (steps - before.steps) / (after.steps - before.steps)
    earlier, later = getattr(before, name), getattr(after, name)
    return float(earlier + share * (later - earlier))
