"""Runs that start runs: how deep and how many, a cancel that wins against them, and runs that wait for themselves."""

from __future__ import annotations

import dataclasses
import json
from typing import Any
from uuid import UUID

import pytest
from click.testing import CliRunner

from orchestrator import RunHandle
from orchestrator.cli import main
from orchestrator.errors import InvalidWorkflow
from orchestrator.store.insights import list_steps
from tests.integration.stage import System
from tests.integration.test_dag_runs import apply, begin, finish, row


def limited(system: System, **settings: Any) -> None:
    system.settings = dataclasses.replace(system.settings, **settings)
    system.lead()


def look_until_ended(system: System, *runs: RunHandle[Any]) -> None:
    system.look_until(lambda: all(row(system, run)["ended_at"] is not None for run in runs))


NEST = """
name: nest
params: {n: {default: 0}, list: {default: [1]}}
tasks:
  down: {workflow: nest, foreach: params.list, input: {n: "${params.n + 1}", list: "${params.list}"}}
"""


def test_runs_start_each_other_only_so_deep(system: System) -> None:
    limited(system, max_depth=5)
    run = begin(system, NEST)
    look_until_ended(system, run)
    assert run.progress().status == "failed"
    assert system.count("runs") == 6
    deepest = system.sql("SELECT id FROM orchestrator.runs ORDER BY depth DESC LIMIT 1")[0]["id"]
    with system.engine.connect() as connection:
        (step,) = list_steps(connection, UUID(str(deepest)))
    assert step.reason == (
        "A run of workflow 'nest' would be 6 runs below the first, and at most 5 are allowed. Does it start itself "
        "without end? Else raise the setting max_depth."
    )


def test_a_run_has_only_so_many_below_it(system: System) -> None:
    limited(system, max_descendants=20)
    run = begin(system, NEST, list=[1, 2, 3])
    look_until_ended(system, run)
    assert run.progress().status == "failed"
    assert 10 < system.count("runs") <= 21
    assert system.sql("SELECT DISTINCT open FROM orchestrator.runs") == [{"open": 0}]
    reasons = set()
    with system.engine.connect() as connection:
        for found in system.sql("SELECT id FROM orchestrator.runs WHERE failed > 0"):
            reasons.update(step.reason for step in list_steps(connection, UUID(str(found["id"]))))
    assert any("at most 20 are allowed below one run" in str(reason) for reason in reasons)


def test_ends_that_start_runs_end(system: System) -> None:
    limited(system, max_depth=3)
    on = "on: [{{workflow: {0}, state: ended, filter: \"${{event.state != 'never'}}\"}}]\ntasks: {{a: {{task: job}}}}"
    apply(system, "name: ping\n" + on.format("pong"), "name: pong\n" + on.format("ping"))
    worker = system.worker()
    system.app.workflows["ping"].start()
    system.look()
    for _ in range(10):
        finish(system, worker)
        system.look()
    assert [found["depth"] for found in system.sql("SELECT depth FROM orchestrator.runs ORDER BY depth")] == [
        0,
        1,
        2,
        3,
    ]


def test_a_cancel_of_the_first_run_wins(system: System) -> None:
    """However many runs are made in each tick."""
    run = begin(system, NEST, list=[1, 2, 3])
    system.look(5)
    many = system.count("runs")
    assert many > 50
    run.cancel()
    system.look()
    most = system.count("runs")
    look_until_ended(system, run)
    assert system.count("runs") <= most
    assert system.sql("SELECT DISTINCT status FROM orchestrator.runs") == [{"status": "cancelled"}]


# -- what can never end is refused


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            ["name: again\non: [{workflow: again}]\ntasks: {a: {task: job}}"],
            "on: every run of 'again' that ends so would start the next, without end. Add a filter.",
        ),
        (
            ["name: again\ntasks: {a: {task: job}, b: {workflow: again, depends_on: [a]}}"],
            "tasks.b.workflow: every run of 'again' would start another, without end. Add a when.",
        ),
        (
            [
                "name: one\ntasks: {a: {workflow: two}}",
                "name: two\ntasks: {a: {workflow: three, parallel: 2}}",
                "name: three\ntasks: {a: {workflow: one}}",
            ],
            "Every run of workflow 'three' would start another, without end: three → one → two → three. Add a when",
        ),
        (
            ["name: tick\non: [{workflow: tock}]\n{A}", "name: tock\non: [{workflow: tick, state: ended}]\n{A}"],
            "Every run of workflow 'tock' would start another, without end: tock → tick → tock. Add a when",
        ),
    ],
)
def test_a_workflow_that_starts_itself_for_ever_is_refused(system: System, texts: list[str], message: str) -> None:
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


def test_a_run_whose_child_waits_for_it_fails_and_says_so(system: System) -> None:
    worker = system.worker()
    apply(system, "name: inner\nconcurrency: {limit: 1, key: x}\ntasks: {go: {workflow: outer, input: {deep: true}}}")
    run = begin(
        system,
        "name: outer\nconcurrency: 1\nparams: {deep: {default: false}}\ntasks:\n"
        "  a: {task: job}\n  b: {workflow: inner, when: 'not params.deep'}\n",
    )
    finish(system, worker)
    look_until_ended(system, run)
    assert run.progress().status == "failed"
    found = system.sql("SELECT status, reason FROM orchestrator.runs ORDER BY depth")
    assert [each["status"] for each in found] == ["failed", "failed", "failed"]
    assert found[2]["reason"] == "waits for itself: runs above it hold its limit of 1 at once"
    again = system.app.workflows["outer"].start(deep=True)
    system.look()
    finish(system, worker)
    assert again.progress().status == "success", "the limit is free again"


def test_runs_whose_children_wait_for_each_other_do_not_wait_for_ever(system: System) -> None:
    text = (
        "name: pair\nconcurrency: 2\nparams: {deep: {default: 0}}\n"
        "tasks: {b: {workflow: pair, when: 'params.deep < 1', input: {deep: 1}}}"
    )
    apply(system, text)
    runs = [system.app.workflows["pair"].start() for _ in range(2)]
    look_until_ended(system, *runs)
    states = sorted(run.progress().status for run in runs)
    assert states == ["failed", "success"], "one had to give way"


def test_a_run_that_waits_for_its_limit_says_for_whom(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", system.settings.database_url)
    monkeypatch.setenv("ORCHESTRATOR_REDIS_URL", system.settings.redis_url)

    def run(*words: str) -> str:
        return CliRunner().invoke(main, words).stdout

    first = begin(system, "name: single\nconcurrency: 1\ntasks: {a: {task: job}}")
    second = system.app.workflows["single"].start()
    system.look()
    shown = run("runs", "show", second.id)
    assert f"waits for its limit of 1 at once: run {first.id}" in " ".join(shown.split())
    assert json.loads(run("runs", "show", second.id, "--json"))["held_by"] == [first.id]
    assert "waits for" not in run("runs", "show", first.id)
