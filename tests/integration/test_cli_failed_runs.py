"""Command output for runs with large parameters, failures without a task, and events that no workflow waits for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from orchestrator.cli import main
from tests.integration.serving import both_ways  # noqa: F401
from tests.integration.stage import System
from tests.integration.test_dag_runs import apply, begin, finish


@pytest.fixture
def run(system: System, in_empty_folder: Path) -> Callable[..., Result]:
    return lambda *words: CliRunner().invoke(main, list(words))


def test_long_parameters_are_cut_in_text_but_not_in_json(system: System, run: Callable[..., Result]) -> None:
    text = "name: long\nparams: {long: {type: string}, short: {default: 1}}\ntasks: {a: {task: job}}"
    started = begin(system, text, long="x" * 100_000)
    shown = run("runs", "show", started.id).stdout
    assert len(shown) < 10_000
    words = " ".join(shown.split())
    assert "… (100,002 characters; all of them: --json), short=1" in words
    assert json.loads(run("runs", "show", started.id, "--json").stdout)["params"]["long"] == "x" * 100_000


@pytest.mark.parametrize(
    ("steps", "hints"),
    [
        ("a: {task: job}", ["orchestrator tasks list --run {} --status failed"]),
        ("a: {task: job, when: '${params.n.missing}'}", ["orchestrator runs show {} --json | jq"]),
        ("a: {workflow: below}", ["orchestrator runs list --parent {} --status failed"]),
        (
            "a: {task: job}, b: {task: job, foreach: params.n}, c: {workflow: below}",
            [
                "tasks list --run {} --status failed and",
                "runs list --parent {} --status failed and",
                "runs show {} --json",
            ],
        ),
    ],
)
def test_a_failed_run_hints_at_commands_that_show_the_reason(
    system: System, run: Callable[..., Result], steps: str, hints: list[str]
) -> None:
    apply(system, "name: below\ntasks: {z: {task: job}}")
    worker = system.worker()
    started = begin(system, f"name: fails\nparams: {{n: {{default: 1}}}}\ntasks: {{{steps}}}")
    finish(system, worker, fail=("a", "z"))
    system.pass_seconds(3)
    assert started.progress().status == "failed"
    said = " ".join(run("runs", "show", started.id).stderr.split())
    assert said.count("orchestrator ") == len(hints)
    for hint in hints:
        assert hint.format(started.id) in said


def test_posting_an_event_names_the_workflows_it_may_start(system: System, run: Callable[..., Result]) -> None:
    apply(
        system,
        "name: first\non: [{event: file.arrived}]\ntasks: {a: {task: job}}",
        "name: second\non: [{workflow: first}, {event: file.arrived, filter: '${event.size > 1}'}]\n"
        "tasks: {a: {task: job}}",
    )
    heard = run("events", "post", "file.arrived").output
    assert (
        heard
        == "Posted file.arrived. It starts a run of each of these workflows whose filter it matches: first, second\n"
    )
    unheard = run("events", "post", "file.arived").output
    assert (
        unheard == "Posted file.arived. No workflow waits for it, so it starts nothing: orchestrator workflows list\n"
    )
