"""Runs that start runs: limits on depth and number, cancels of a tree, and runs that wait for themselves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy
from click.testing import CliRunner

from orchestrator import RunFailed, RunHandle, WorkflowContext
from orchestrator.cli import main
from orchestrator.errors import InvalidWorkflow, NotFound
from orchestrator.scheduler.loop import Scheduler
from orchestrator.sdk.code.engine import Engine
from orchestrator.store.dag import plans, workflows
from orchestrator.store.insights import list_steps
from orchestrator.store.runs import creation
from orchestrator.store.sql import Prepared
from tests.integration.code_stage import act
from tests.integration.stage import System, Worker
from tests.integration.test_bounded_ticks import real
from tests.integration.test_dag_runs import apply, begin, finish, row


@pytest.fixture
def leader(engine: sqlalchemy.Engine, system: System) -> Iterator[Scheduler]:
    with real(engine, system, system.settings.lease) as leader:
        yield leader


def lead_with(system: System, **settings: Any) -> None:
    system.settings = dataclasses.replace(system.settings, **settings)
    system.lead()


def tick_until_ended(system: System, *runs: RunHandle[Any]) -> None:
    system.tick_until(lambda: all(row(system, run)["ended_at"] is not None for run in runs))


NEST = """
name: nest
params: {n: {default: 0}, list: {default: [1]}}
tasks:
  down: {workflow: nest, foreach: params.list, input: {n: "${params.n + 1}", list: "${params.list}"}}
"""


def test_the_depth_of_child_runs_is_limited(system: System) -> None:
    lead_with(system, max_depth=5)
    run = begin(system, NEST)
    tick_until_ended(system, run)
    assert run.progress().status == "failed"
    assert system.count("runs") == 6
    deepest = system.sql("SELECT id FROM orchestrator.runs ORDER BY depth DESC LIMIT 1")[0]["id"]
    with system.engine.connect() as connection:
        (step,) = list_steps(connection, UUID(str(deepest)))
    assert step.reason == (
        "A run of workflow 'nest' would be 6 runs below the first, and at most 5 are allowed. Does it start itself "
        "without end? Else raise the setting max_depth."
    )


def test_the_number_of_descendants_is_limited(system: System) -> None:
    lead_with(system, max_descendants=20)
    run = begin(system, NEST, list=[1, 2, 3])
    tick_until_ended(system, run)
    assert run.progress().status == "failed"
    assert 10 < system.count("runs") <= 21
    assert system.sql("SELECT DISTINCT open FROM orchestrator.runs") == [{"open": 0}]
    reasons: set[str | None] = set()
    with system.engine.connect() as connection:
        for found in system.sql("SELECT id FROM orchestrator.runs WHERE failed > 0"):
            reasons.update(step.reason for step in list_steps(connection, UUID(str(found["id"]))))
    assert any("at most 20 are allowed below one run" in str(reason) for reason in reasons)


def test_runs_triggered_by_ends_stop_at_the_depth_limit(system: System) -> None:
    lead_with(system, max_depth=3)
    on = "on: [{{workflow: {0}, state: ended, filter: \"${{event.state != 'never'}}\"}}]\ntasks: {{a: {{task: job}}}}"
    apply(system, "name: ping\n" + on.format("pong"), "name: pong\n" + on.format("ping"))
    worker = system.worker()
    system.app.workflows["ping"].start()
    system.pass_seconds()
    for _ in range(10):
        finish(system, worker)
        system.pass_seconds()
    assert [found["depth"] for found in system.sql("SELECT depth FROM orchestrator.runs ORDER BY depth")] == [
        0,
        1,
        2,
        3,
    ]


def test_deleting_a_workflow_stops_runs_that_trigger_each_other(system: System) -> None:
    on = "on: [{{workflow: {0}, state: ended, filter: \"${{event.state != 'never'}}\"}}]\ntasks: {{a: {{task: job}}}}"
    apply(system, "name: ping\n" + on.format("pong"), "name: pong\n" + on.format("ping"))
    worker = system.worker()

    def has_worked_until(is_so: bool) -> bool:
        if not is_so and (taken := worker.take()):
            worker.succeed(*taken)
        return is_so

    system.app.workflows["ping"].start()
    system.pass_seconds()
    system.tick_until(lambda: has_worked_until(system.count("runs") >= 4))
    system.app.workflows["pong"].delete()
    assert system.app.workflows.names() == ["ping"]
    system.tick_until(lambda: has_worked_until(open_runs(system) == 0))
    assert system.sql("SELECT DISTINCT status FROM orchestrator.runs") == [{"status": "success"}]
    with pytest.raises(NotFound, match="There is no workflow 'pong'"):
        system.app.workflows["pong"].delete()


def test_cancelling_the_root_run_stops_a_growing_tree(system: System) -> None:
    """However many runs a tick creates."""
    run = begin(system, NEST, list=[1, 2, 3])
    system.pass_seconds(5)
    many = system.count("runs")
    assert many > 50
    run.cancel()
    system.pass_seconds()
    most = system.count("runs")
    tick_until_ended(system, run)
    assert system.count("runs") <= most
    assert system.sql("SELECT DISTINCT status FROM orchestrator.runs") == [{"status": "cancelled"}]


def open_runs(system: System) -> int:
    return int(system.sql("SELECT count(*) AS count FROM orchestrator.runs WHERE ended_at IS NULL")[0]["count"])


def test_a_new_run_begins_at_once_beside_a_large_tree(system: System) -> None:
    """The ids of a tree sort before those of runs that start after its root."""
    apply(system, "name: small\ntasks: {a: {task: job}, b: {workflow: one}}", "name: one\ntasks: {a: {task: job}}")
    lead_with(system, batch=20)
    worker = system.worker()
    run = begin(system, NEST, list=[1, 2, 3])
    system.pass_seconds(8)
    assert open_runs(system) > 100
    system.app.workflows["small"].start()
    system.pass_seconds()
    assert len(worker.take()) == 1, "its first task"
    system.pass_seconds()
    assert len(worker.take()) == 1, "that of its child, which began in the next tick"
    assert run.progress().status == "running"


def test_many_trees_take_turns(system: System) -> None:
    """More trees wait than runs begin in one tick, and not only the oldest trees are served."""
    lead_with(system, batch=5)
    apply(system, NEST, "name: one\ntasks: {a: {task: job}}")
    worker = system.worker()
    for _ in range(12):
        system.app.workflows["nest"].start(list=[1, 2, 3])
        system.tick()
    system.pass_seconds(3)
    system.app.workflows["one"].start()
    looks = 0
    while not worker.take():
        system.pass_seconds()
        looks += 1
        assert looks <= 4


def test_pending_changes_of_trees_are_processed_in_turns(
    system: System, leader: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When time is short, the ends in a large tree wait, and the end of a small run does not wait for them."""
    apply(
        system,
        "name: leaf\ntasks: {a: {task: job}, b: {task: job, depends_on: [a]}}",
        "name: wide\ntasks: {down: {workflow: leaf, parallel: 150}}",
        "name: small\ntasks: {a: {task: job}, b: {task: job, depends_on: [a]}}",
    )
    worker = system.worker(slots=1_000)
    system.app.workflows["wide"].start()
    while system.count("tasks") < 150:
        leader.tick()
    fresh = system.app.workflows["small"].start()
    taken: list[Any] = []
    while len(taken) < 151:
        leader.tick()
        taken += worker.take()
    monkeypatch.setattr("orchestrator.scheduler.budget.SHARE", 0.0)
    leader._pace._slice.shrink(50)
    worker.succeed(*taken)
    leader.tick()
    assert system.count("untold") > 100
    leader.tick()
    assert row(system, fresh)["success"] == 1
    assert system.count("untold") > 50, "the large tree waits"


def test_runs_begin_in_order_of_their_start_across_trees(system: System, leader: Scheduler) -> None:
    apply(
        system,
        "name: other\ntasks: {a: {task: job}}",
        "name: line\nconcurrency: 1\ntasks: {a: {task: job}}",
    )
    # Runs of one millisecond count as one tree, and each tree begins one run before any begins a second.
    began = [("01a1e1d4-cb84-7000", "other"), ("01a1e1d4-cb84-7001", "line"), ("01a1e1d4-cd7e-7000", "line")]
    with system.engine.begin() as connection:
        for prefix, name in began:
            stored = workflows.latest(connection, name)
            assert stored is not None
            run = UUID(f"{prefix}-8000-000000000000").bytes
            creation.create(connection, [plans.new_run(stored.definition, stored.version, run, {})])
    leader._pace._slice.shrink(1)
    leader.tick()
    states = system.sql("SELECT status FROM orchestrator.runs ORDER BY id")
    assert [found["status"] for found in states] == ["running", "running", "pending"]


def test_a_large_tree_is_cancelled_in_a_few_statements(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begin(system, NEST, list=[1, 2, 3])
    system.pass_seconds(7)
    assert (many := open_runs(system)) > 1_000
    statements = 0
    original = Prepared._send

    def counting(*arguments: Any) -> Any:
        nonlocal statements
        statements += 1
        return original(*arguments)

    monkeypatch.setattr(Prepared, "_send", counting)
    run.cancel()
    system.pass_seconds(3)
    assert open_runs(system) == 0
    assert statements < 100
    assert system.sql("SELECT status, count(*) FROM orchestrator.runs GROUP BY 1") == [
        {"status": "cancelled", "count": many}
    ]
    assert system.sql("SELECT FROM orchestrator.runs WHERE open <> 0 OR total <> cancelled") == []
    with system.engine.connect() as connection:
        assert {step.state for step in list_steps(connection, UUID(run.id))} == {"cancelled"}


def test_a_run_that_is_being_cancelled_starts_nothing_more(system: System) -> None:
    below = "b: {task: job, depends_on: [a]}, c: {workflow: one, depends_on: [a]}"
    apply(system, "name: one\ntasks: {a: {task: job}}")
    worker = system.worker()
    run = begin(system, f"name: chain\ntasks: {{a: {{task: job}}, {below}}}")
    (task,) = worker.take()
    run.cancel()
    worker.succeed(task)  # applied before the cancel request
    system.pass_seconds(3)
    assert run.progress().status == "cancelled"
    assert worker.take() == []
    assert system.count("runs") in (1, 2)
    assert open_runs(system) == 0


def test_a_timed_out_tree_is_retried_where_it_stopped(system: System) -> None:
    """The timeout cancelled the child runs in whatever state they were."""
    apply(
        system,
        "name: leaf\nparams: {n: {}}\ntasks: {a: {task: job}, b: {task: job, depends_on: [a]}}",
        "name: fan\ntasks: {go: {workflow: leaf, foreach: '[1, 2, 3]', concurrency: 2, input: {n: '${item}'}}}",
    )
    worker = system.worker()
    run = begin(system, "name: top\ntimeout: 1h\ntasks: {x: {workflow: fan}, y: {task: job, depends_on: [x]}}")
    system.pass_seconds(2)
    worker.succeed(worker.take()[0])
    system.pass_seconds()
    system.sql("UPDATE orchestrator.runs SET deadline = now() - interval '1 s' WHERE id = CAST(:id AS uuid)", id=run.id)
    tick_until_ended(system, run)
    assert run.progress().status == "failed"
    assert open_runs(system) == 0
    with system.engine.connect() as connection:
        assert {step.state for step in list_steps(connection, UUID(run.id))} == {"cancelled"}
    worker.held.clear()
    worker.take()
    run.retry()
    for _ in range(12):
        system.pass_seconds()
        worker.succeed(*worker.take())
    assert run.progress().status == "success"
    assert system.sql("SELECT DISTINCT open, failed, cancelled FROM orchestrator.runs") == [
        {"open": 0, "failed": 0, "cancelled": 0}
    ]


def play_code(system: System, engine: Engine, worker: Worker) -> None:
    """Take the turns of all code until no turn is left."""
    system.pass_seconds(2)
    while turns := worker.take():
        worker.report(*(act(engine, turn) for turn in turns))
        system.pass_seconds(2)


@pytest.mark.parametrize(("settings", "runs"), [({"max_depth": 4}, 5), ({"max_descendants": 6}, 4)])
def test_a_recursive_code_workflow_stops_at_its_limits(system: System, settings: dict[str, int], runs: int) -> None:
    """Either as deep as allowed, with one continuation in each run, or as many as allowed, three at a time."""
    lead_with(system, **settings)
    width = 3 if "max_descendants" in settings else 1

    @system.app.workflow(name="forks")
    async def forks(ctx: WorkflowContext, again: bool = True) -> int:
        if again:
            ctx.continue_as_new(False)
        return sum([1 + await child for child in [forks.schedule() for _ in range(width)]])

    worker = system.worker(knows=("forks",), slots=100)
    handle = forks.start()
    with closing(Engine(system.app.code_workflows.find, 1_000_000)) as engine:
        play_code(system, engine, worker)
    with pytest.raises(RunFailed, match=f"Does it start itself without end.*{next(iter(settings))}"):
        handle.result(1)
    begun = system.sql("SELECT depth, root FROM orchestrator.runs WHERE reason IS DISTINCT FROM 'continued'")
    assert len(begun) == runs
    assert max(row["depth"] for row in begun) <= settings.get("max_depth", 100)


# -- endless recursion is rejected


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            ["name: again\non: [{workflow: again}]\ntasks: {a: {task: job}}"],
            "on: every run of 'again' that ends this way would start the next, forever. Add a filter.",
        ),
        (
            ["name: again\ntasks: {a: {task: job}, b: {workflow: again, depends_on: [a]}}"],
            "tasks.b.workflow: every run of 'again' would start another, forever. Add a when.",
        ),
        (
            [
                "name: one\ntasks: {a: {workflow: two}}",
                "name: two\ntasks: {a: {workflow: three, parallel: 2}}",
                "name: three\ntasks: {a: {workflow: one}}",
            ],
            "Every run of workflow 'three' would start another, forever: three → one → two → three. Add a when",
        ),
        (
            ["name: tick\non: [{workflow: tock}]\n{A}", "name: tock\non: [{workflow: tick, state: ended}]\n{A}"],
            "Every run of workflow 'tock' would start another, forever: tock → tick → tock. Add a when",
        ),
    ],
)
def test_a_workflow_that_starts_itself_forever_is_rejected(system: System, texts: list[str], message: str) -> None:
    *first, last = [text.replace("{A}", "tasks: {a: {task: job}}") for text in texts]
    apply(system, *first)
    with pytest.raises(InvalidWorkflow) as caught:
        apply(system, last)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "name: may\ntasks: {b: {workflow: may, when: '1 > 2'}}",
        "name: may\nparams: {l: {default: []}}\ntasks: {b: {workflow: may, foreach: params.l}}",
        "name: may\ntasks: {a: {task: job, when: '1 > 2'}, b: {workflow: may, depends_on: [a]}}",
        "name: may\ntasks: {a: {task: job}, b: {workflow: may, depends_on: [a], trigger: any_failed}}",
        "name: may\non: [{workflow: may, filter: 'event.x'}]\nparams: {n: {default: 0}}\ntasks: {a: {task: job}}",
        "name: may\non: [{workflow: may, state: failed}]\ntasks: {a: {task: job}}",
    ],
)
def test_a_workflow_that_may_start_itself_is_accepted(system: System, text: str) -> None:
    apply(system, text)


# -- runs that wait for themselves


def test_a_child_that_waits_for_its_ancestors_limit_fails(system: System) -> None:
    worker = system.worker()
    apply(system, "name: inner\nconcurrency: {limit: 1, key: x}\ntasks: {go: {workflow: outer, input: {deep: true}}}")
    run = begin(
        system,
        "name: outer\nconcurrency: 1\nparams: {deep: {default: false}}\ntasks:\n"
        "  a: {task: job}\n  b: {workflow: inner, when: 'not params.deep'}\n",
    )
    finish(system, worker)
    tick_until_ended(system, run)
    assert run.progress().status == "failed"
    found = system.sql("SELECT status, reason FROM orchestrator.runs ORDER BY depth")
    assert [each["status"] for each in found] == ["failed", "failed", "failed"]
    assert found[2]["reason"] == "waits for itself: runs above it hold its limit of 1 at once"
    again = system.app.workflows["outer"].start(deep=True)
    system.pass_seconds()
    finish(system, worker)
    assert again.progress().status == "success", "the limit is free again"


def test_a_deadlock_of_runs_over_a_limit_is_broken(system: System) -> None:
    text = (
        "name: pair\nconcurrency: 2\nparams: {deep: {default: 0}}\n"
        "tasks: {b: {workflow: pair, when: 'params.deep < 1', input: {deep: 1}}}"
    )
    apply(system, text)
    runs = [system.app.workflows["pair"].start() for _ in range(2)]
    tick_until_ended(system, *runs)
    states = sorted(run.progress().status for run in runs)
    assert states == ["failed", "success"], "one had to give way"


@pytest.mark.usefixtures("in_empty_folder")
def test_a_run_that_waits_for_its_limit_names_the_holder(system: System) -> None:
    def run(*words: str) -> str:
        return CliRunner().invoke(main, words).stdout

    first = begin(system, "name: single\nconcurrency: 1\ntasks: {a: {task: job}}")
    second = system.app.workflows["single"].start()
    system.pass_seconds()
    shown = run("runs", "show", second.id)
    assert f"waits for its limit of 1 at once: run {first.id}" in " ".join(shown.split())
    assert json.loads(run("runs", "show", second.id, "--json"))["held_by"] == [first.id]
    assert "waits for" not in run("runs", "show", first.id)
