"""Retries of failed workflow runs, by the rule of docs/workflows.md."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import random
import sys
import uuid
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import msgspec
import pytest

from orchestrator import RunHandle
from orchestrator.domain.dag.definition import Definition, Step
from orchestrator.domain.dag.state import DagState, StepState
from orchestrator.domain.tasks.task import Dispatch, Succeeded
from orchestrator.errors import WrongState
from orchestrator.store.insights import show_run
from orchestrator.store.insights.steps import list_steps, seconds_of_steps, states_of_runs
from tests.integration.stage import ONE, System, Worker
from tests.integration.test_dag_runs import apply, begin, finish, row, steps_of


def counts(run: RunHandle[Any]) -> tuple[str, int, int, int, int, int]:
    progress = run.progress()
    found = progress.counters
    return progress.status, found.total, found.success, found.failed, found.cancelled, found.skipped


def retry(system: System, run: RunHandle[Any]) -> None:
    run.retry()
    system.pass_seconds(3)


def given(task: Dispatch) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.msgpack.decode(task.payload)[1]
    return found


# -- what a retry runs again


def test_a_retry_succeeds_after_the_missing_child_workflow_is_applied(system: System) -> None:
    worker = system.worker()
    run = begin(
        system,
        "name: wide\nparams: {list: {default: [1, 2, 3]}}\ntasks:\n"
        "  a: {task: job}\n"
        "  each: {workflow: later, depends_on: [a], foreach: params.list, input: {n: '${item}'}}\n"
        "  last: {task: job, depends_on: [each]}\n",
    )
    finish(system, worker)
    assert counts(run) == ("failed", 5, 1, 3, 0, 1)
    for _ in range(2):
        retry(system, run)
        assert counts(run) == ("failed", 5, 1, 3, 0, 1), "the total never grows"
    apply(system, "name: later\nparams: {n: {}}\ntasks: {x: {task: job}}")
    run.retry()
    system.pass_seconds()
    assert finish(system, worker) == ["x", "x", "x", "last"]
    assert counts(run) == ("success", 5, 5, 0, 0, 0)


def test_a_retried_run_gets_its_whole_timeout_again(system: System) -> None:
    worker = system.worker()
    run = begin(
        system,
        "name: slow\ntimeout: 1m\nparams: {list: {default: [1, 2, 3, 4]}}\ntasks:\n"
        "  a: {task: job, foreach: params.list, concurrency: 2}\n  b: {task: job, depends_on: [a]}\n",
    )
    worker.succeed(worker.take()[0])
    system.tick(2)
    system.lead(offset=100)
    system.tick_until(lambda: run.progress().status == "failed")
    assert row(system, run)["reason"] == "timed out"
    assert counts(run) == ("failed", 5, 1, 0, 4, 0)
    worker.held.clear()
    run.retry()
    system.tick_until(lambda: run.progress().status == "running" and row(system, run)["open"] == 4)
    found = row(system, run)
    assert (found["reason"], found["cancelling"], found["open"]) == (None, False, 4)
    assert 50 < (found["deadline"] - found["started_at"]).total_seconds() - 100 <= 70
    system.pass_seconds()
    assert finish(system, worker) == ["a", "a", "a", "b"], "what succeeded stays"
    assert counts(run) == ("success", 5, 5, 0, 0, 0)


@pytest.mark.parametrize("of", ["a workflow", "many tasks"])
def test_the_duration_of_a_retried_run_starts_at_its_retry(system: System, of: str) -> None:
    worker = system.worker()
    if of == "a workflow":
        run = begin(system, "name: short\ntasks: {a: {task: job}}")
    else:
        run = system.app.start_many(system.job.options(retries=0), [(1,)])
        system.settle()
        system.dispatch()
    worker.fail(worker.take()[0])
    system.tick_until(lambda: run.progress().status == "failed")
    read = partial(show_run, run=UUID(run.id))
    with system.engine.connect() as connection:
        before = read(connection)
    assert before is not None
    assert before.retried_at is None
    assert before.began_at == before.started_at
    system.lead(offset=3_600)
    run.retry()
    system.pass_seconds()
    worker.succeed(worker.take()[0])
    system.tick_until(lambda: run.progress().status == "success")
    with system.engine.connect() as connection:
        after = read(connection)
    assert after is not None
    assert after.began_at is not None
    assert after.ended_at is not None
    assert after.started_at == before.started_at
    assert (after.ended_at - after.began_at).total_seconds() < 600, "the hour until the retry is no part of it"


def test_the_duration_of_a_partly_retried_fan_out_starts_at_its_retry(system: System) -> None:
    worker = system.worker()
    run = begin(system, "name: wide\ntasks:\n  a: {task: job}\n  each: {task: job, depends_on: [a], foreach: [1, 2]}")
    worker.succeed(worker.take()[0])
    system.pass_seconds()
    good, bad = worker.take()
    worker.succeed(good)
    worker.fail(bad)
    system.tick_until(lambda: run.progress().status == "failed")
    system.lead(offset=3_600)
    run.retry()
    system.pass_seconds()
    (again,) = worker.take()
    worker.report(Succeeded(again.id, again.attempt, 0.0, ONE))  # zero: it cannot begin before its dispatch
    system.tick_until(lambda: run.progress().status == "success")
    with system.engine.connect() as connection:
        first, each = list_steps(connection, UUID(run.id))
        of_grid = states_of_runs(connection, "wide", [UUID(run.id)])[0].seconds["each"]
        compared = seconds_of_steps(connection, UUID(run.id), ["each"])["each"]
    assert each.started_at is not None
    assert each.ended_at is not None
    assert first.ended_at is not None
    assert each.started_at - first.ended_at > timedelta(minutes=59)
    assert each.ended_at - each.started_at < timedelta(minutes=1)
    assert max(of_grid, compared or 0.0) < 60


def test_a_retried_step_runs_before_the_steps_that_depend_on_it(system: System) -> None:
    worker = system.worker()
    run = begin(
        system,
        "name: stairs\ntasks:\n  a: {task: job}\n"
        "  b: {task: job, depends_on: [a], trigger: all_ended}\n"
        "  c: {task: job, depends_on: [b], trigger: all_ended, input: {number: '${a}'}}\n",
    )
    assert finish(system, worker, fail=("a", "c")) == ["a", "b", "c"]
    run.retry()
    system.pass_seconds(2)
    (a,) = worker.take()
    assert steps_of([a]) == ["a"], "and not c, although b has succeeded"
    worker.succeed(a, result=msgspec.msgpack.encode("at last"))
    system.tick(2)
    (c,) = worker.take()
    assert (steps_of([c]), given(c)) == (["c"], {"number": "at last"})
    assert c.attempt == 2, "a report of the first attempt is none of this one"
    worker.succeed(c)
    system.tick()
    assert counts(run) == ("success", 3, 3, 0, 0, 0)
    assert system.count("attempts") == 2


@pytest.mark.parametrize("when", ["at once", "begun"])
def test_two_concurrent_retries_of_a_run_have_one_effect(system: System, when: str) -> None:
    worker = system.worker()
    run = begin(system, "name: twice\ntasks:\n  a: {task: job}\n  b: {task: job, depends_on: [a]}\n")
    worker.fail(*worker.take(), retryable=False)
    system.pass_seconds(2)
    assert run.status() == "failed"
    run.retry()
    if when == "begun":
        system.pass_seconds()
    # A second request, made when the run still looked failed.
    system.sql("INSERT INTO orchestrator.inbox (kind, target) VALUES ('retry run', CAST(:run AS uuid))", run=run.id)
    system.pass_seconds(2)
    assert finish(system, worker) == ["a", "b"]
    assert counts(run) == ("success", 2, 2, 0, 0, 0)


def test_a_retried_run_waits_for_its_concurrency_limit(system: System) -> None:
    worker = system.worker()
    text = "name: one-at-a-time\nconcurrency: 1\ntasks: {a: {task: job}}"
    first = begin(system, text)
    finish(system, worker, fail=("a",))
    second = begin(system, text)
    first.retry()
    system.pass_seconds(3)
    assert [run.progress().status for run in (first, second)] == ["pending", "running"]
    assert len(worker.take()) == 1
    system.lead()
    system.pass_seconds(2)
    assert worker.take() == []
    second.cancel()
    system.tick_until(lambda: first.progress().status == "running")
    system.pass_seconds(2)
    assert finish(system, worker) == ["a"]
    assert [run.progress().status for run in (first, second)] == ["success", "cancelled"]


@pytest.mark.parametrize("fan_out", [False, True])
def test_a_run_retry_includes_tasks_cancelled_by_a_user(system: System, fan_out: bool) -> None:
    worker = system.worker()
    each = "foreach: '[1, 2]', " if fan_out else ""
    run = begin(system, f"name: cancelled\ntasks:\n  a: {{{each}task: job}}\n  b: {{task: job, depends_on: [a]}}\n")
    tasks = worker.take()
    system.app.handle(str(uuid.UUID(bytes=tasks[0].id))).cancel()
    system.tick(2)
    worker.succeed(*tasks[1:])
    system.tick(2)
    assert run.progress().status == "failed"
    worker.held.clear()
    run.retry()
    system.pass_seconds(2)
    assert finish(system, worker) == ["a", "b"]
    assert counts(run)[0] == "success"
    assert run.progress().counters.cancelled == 0


def test_a_bulk_run_retry_includes_tasks_cancelled_by_a_user(system: System) -> None:
    worker = system.worker()
    run = system.app.start_many(system.job, range(3))
    system.pass_seconds()
    tasks = worker.take()
    system.app.handle(str(uuid.UUID(bytes=tasks[0].id))).cancel()
    system.tick(2)
    worker.succeed(*tasks[1:])
    system.tick()
    assert counts(run) == ("failed", 3, 2, 0, 1, 0)
    worker.held.clear()
    retry(system, run)
    worker.succeed(*worker.take())
    system.tick()
    assert counts(run) == ("success", 3, 3, 0, 0, 0)


@pytest.mark.parametrize("of_many", [False, True])
def test_a_failed_task_of_a_cancelled_run_cannot_be_retried(system: System, of_many: bool) -> None:
    worker = system.worker()
    if of_many:
        run, advice = system.app.start_many(system.job, range(2)), "Enqueue it again"
        system.pass_seconds()
    else:
        run, advice = begin(system, "name: two\ntasks: {a: {task: job}, b: {task: job}}"), "orchestrator runs rerun"
    failed, _ = worker.take()
    worker.fail(failed)
    system.tick()
    run.cancel()
    system.tick_until(lambda: run.progress().status == "cancelled")
    with pytest.raises(WrongState, match=f"Cannot retry task .*: its run was cancelled. .*{advice}"):
        system.app.handle(str(uuid.UUID(bytes=failed.id))).retry()  # used to be accepted without effect


def test_a_retried_fan_out_respects_its_concurrency(system: System) -> None:
    worker = system.worker()
    run = begin(system, "name: narrow\ntasks: {a: {task: job, foreach: '[1, 2, 3, 4, 5]', concurrency: 2}}")
    assert finish(system, worker, fail=("a",)) == ["a"] * 5
    run.retry()
    system.pass_seconds(2)
    system.lead()
    system.pass_seconds(2)
    ran = 0
    while taken := worker.take():
        assert len(taken) <= 2
        ran += len(taken)
        worker.succeed(*taken)
        system.pass_seconds(2)
    assert (ran, counts(run)) == (5, ("success", 5, 5, 0, 0, 0))


def test_failed_children_are_retried_and_dependent_ones_start_anew(system: System) -> None:
    worker = system.worker()
    apply(system, "name: child\nparams: {n: {}}\ntasks: {x: {task: job}, y: {task: job, depends_on: [x]}}")
    run = begin(
        system,
        "name: family\ntasks:\n"
        "  one: {workflow: child, input: {n: 1}}\n"
        "  two: {workflow: child, input: {n: '${one}'}, depends_on: [one], trigger: all_ended}\n"
        "  many: {workflow: child, foreach: '[1, 2]', input: {n: '${item}'}}\n",
    )
    assert sorted(finish(system, worker, fail=("y",))) == ["x"] * 4 + ["y"] * 4
    assert counts(run) == ("failed", 4, 0, 4, 0, 0)
    run.retry()
    system.pass_seconds(3)
    assert sorted(finish(system, worker)) == ["x", "y", "y", "y", "y"], "two begins anew, with what one gives now"
    assert counts(run) == ("success", 4, 4, 0, 0, 0)
    outputs = run.outputs()
    assert outputs == {"one": {"y": "y"}, "two": {"y": "y"}, "many": [{"y": "y"}] * 2}
    params = system.sql("SELECT params->'n' AS n FROM orchestrator.runs WHERE parent_step = 'two'")
    assert [found["n"] for found in params] == [{"y": "y"}]


def test_a_retry_of_many_tasks_takes_several_ticks_and_loses_none(system: System) -> None:
    """Steps to plan again are deleted in slices, and failed tasks are revived in slices."""
    system.settings = dataclasses.replace(system.settings, batch=5)
    system.lead()
    worker = system.worker(slots=500)
    run = begin(
        system,
        "name: large\nparams: {n: {}}\ntasks:\n  bad: {task: job}\n"
        "  many: {task: job, parallel: params.n}\n"
        "  after: {task: job, parallel: params.n, depends_on: [bad], trigger: all_ended}\n",
        n=60,
    )

    def play_on(fail: tuple[str, ...]) -> list[str]:
        ran: list[str] = []

        def has_ended() -> bool:
            ran.extend(finish(system, worker, fail=fail))
            return row(system, run)["ended_at"] is not None and not system.count("inbox")

        system.tick_until(has_ended)
        return ran

    play_on(("bad", "many", "after"))
    assert counts(run) == ("failed", 121, 0, 121, 0, 0)
    run.retry()
    ran = play_on(())
    assert (ran.count("bad"), ran.count("many"), ran.count("after")) == (1, 60, 60)
    assert counts(run) == ("success", 121, 121, 0, 0, 0)


@pytest.mark.parametrize("forgets", ["nothing", "its plans", "everything"])
def test_tasks_retried_during_the_retry_of_their_run_count_once(
    system: System, monkeypatch: pytest.MonkeyPatch, forgets: str
) -> None:
    """The retry of a run takes several ticks, and the leader may fail between any two of them."""
    system.settings = dataclasses.replace(system.settings, batch=5)
    system.lead()
    worker = system.worker(slots=500)
    run = begin(
        system,
        "name: large\nparams: {n: {}}\ntasks:\n  bad: {task: job}\n  solo: {task: job}\n"
        "  below: {task: job, depends_on: [solo, bad], trigger: all_ended}\n"
        "  few: {task: job, parallel: 3}\n"
        "  after: {task: job, parallel: params.n, depends_on: [bad], trigger: all_ended}\n",
        n=220,
    )

    def play_on(fail: tuple[str, ...]) -> list[str]:
        ran: list[str] = []

        def has_ended() -> bool:
            ran.extend(finish(system, worker, fail=fail))
            return row(system, run)["ended_at"] is not None

        for _ in range(10):
            with contextlib.suppress(AssertionError):
                system.tick_until(has_ended)
                break
        return ran

    play_on(("bad", "solo", "below", "few", "after"))
    assert counts(run) == ("failed", 226, 0, 226, 0, 0)
    tasks = system.sql("SELECT id, step FROM orchestrator.ended_tasks WHERE step IN ('solo', 'few') AND position = 0")
    monkeypatch.setattr("orchestrator.scheduler.budget.SHARE", 0.0)
    run.retry()
    system.tick_until(lambda: system.count("untold"))
    for task in tasks:
        system.app.handle(str(task["id"])).retry()
    taken: list[Dispatch] = []
    for _ in range(3):
        system.pass_seconds()
        assert system.count("untold"), "the retry goes on"
        taken += worker.take()
        worker.succeed(*(task for task in taken if steps_of([task]) == ["solo"]))
        taken = [task for task in taken if steps_of([task]) != ["solo"]]
        if forgets == "its plans":
            system.scheduler.term.dags.rolled_back()
        elif forgets == "everything":
            system.lead()
    assert steps_of(taken) == ["few"]
    monkeypatch.undo()
    system.tick_until(lambda: not system.count("untold"))
    worker.succeed(*taken)
    assert sorted(set(play_on(()))) == ["after", "bad", "below", "few"]
    assert counts(run) == ("success", 226, 226, 0, 0, 0)
    assert row(system, run)["open"] == 0
    assert system.count("tasks") == system.count("untold") == 0


def test_deeply_nested_runs_are_retried(system: System, request: pytest.FixtureRequest) -> None:
    """The Python call stack is no deeper than for a single run."""
    depth = 100
    apply(
        system,
        "name: nest\nparams: {n: {type: integer}}\n"
        "tasks: {down: {workflow: nest, when: 'params.n > 0', input: {n: '${params.n - 1}'}}}",
    )
    ids = [uuid.uuid4() for _ in range(depth)]
    state = msgspec.msgpack.encode(DagState(bytes([StepState.FAILED])))
    for number, run in enumerate(ids):
        system.sql(
            "INSERT INTO orchestrator.runs (id, name, workflow, version, params, status, total, open, failed, state, "
            "started_at, ended_at, parent_run, parent_step, parent_position) VALUES (:id, 'nest', 'nest', 1, "
            "jsonb_build_object('n', CAST(:n AS int)), 'failed', 1, 0, 1, :state, now(), now(), :parent, :step, :pos)",
            id=run,
            n=depth - number - 1,
            state=state,
            parent=ids[number - 1] if number else None,
            step="down" if number else None,
            pos=0 if number else None,
        )
    root = system.app.run(str(ids[0]))
    root.retry()
    limit = sys.getrecursionlimit()
    request.addfinalizer(lambda: sys.setrecursionlimit(limit))
    sys.setrecursionlimit(len(inspect.stack()) + depth)
    for _ in range(depth + 100):
        system.tick()
        if root.progress().status == "success":
            break
    assert root.progress().status == "success"
    assert system.sql("SELECT DISTINCT status, open FROM orchestrator.runs") == [{"status": "success", "open": 0}]


# -- rejected retries


def test_a_child_run_or_its_tasks_are_retried_only_with_their_run(system: System) -> None:
    worker = system.worker()
    apply(system, "name: child\ntasks: {x: {task: job}}", "name: limited\nconcurrency: 1\ntasks: {y: {task: job}}")
    parent = begin(system, "name: parent\ntasks: {a: {workflow: child}}")
    limited = system.app.workflows["limited"].start()
    system.pass_seconds()
    assert sorted(finish(system, worker, fail=("x", "y"))) == ["x", "y"]
    child = system.sql("SELECT id FROM orchestrator.runs WHERE parent_run IS NOT NULL")[0]["id"]
    with pytest.raises(WrongState, match=f"step 'a' of run {parent.id}.*runs retry {parent.id}"):
        system.app.run(str(child)).retry()
    for found in system.sql("SELECT id, run_id FROM orchestrator.ended_tasks"):
        with pytest.raises(WrongState, match=f"Retry the run: orchestrator runs retry {found['run_id']}"):
            system.app.handle(str(found["id"])).retry()
    system.app.retry_failed()
    system.pass_seconds(2)
    assert worker.take() == []
    assert [parent.progress().status, limited.progress().status] == ["failed", "failed"]


# -- random graphs


@pytest.mark.parametrize("seed", range(6))
def test_retries_of_random_graphs_follow_the_rule(system: System, seed: int) -> None:
    chance = random.Random(seed)
    steps = tuple(
        Step(
            name=f"s{place}",
            task="job",
            depends_on=tuple(f"s{up}" for up in range(place) if chance.random() < 0.4),
            trigger=chance.choice(("all_success", "all_ended", "none_failed")),
            parallel=chance.choice([None, None, 1, 3]),
        )
        for place in range(8)
    )
    above = above_of(steps)
    definition = Definition(
        name=f"random-{seed}",
        steps=tuple(
            msgspec.structs.replace(step, input={"number": {name: f"${{{name}}}" for name in sorted(above[step.name])}})
            for step in steps
        ),
    )
    system.app.workflows.apply(definition)
    worker = system.worker(slots=100)
    run = system.app.workflows[definition.name].start()
    system.pass_seconds()
    results: dict[tuple[str, int], Any] = {}
    play(system, worker, chance, results, 0)
    for turn in range(1, 4):
        if run.progress().status != "failed":
            break
        before = states(system, run, definition)
        run.retry()
        system.pass_seconds(3)
        tried = play(system, worker, chance, results, turn)
        after = states(system, run, definition)
        expect = {
            name
            for name, state in before.items()
            if state in ("failed", "cancelled") or (state == "skipped" and touched(name, before, above))
        }
        assert {step for step, _, _ in tried} <= expect, "only what did not succeed, and what is below"
        roots = {name for name in expect if before[name] == "failed" and not touched(name, before, above)}
        assert roots <= {step for step, _, _ in tried}
        outputs = run.outputs()
        for step, _, seen in tried:
            assert seen == {name: outputs.get(name) for name in above[step]}, "each sees what all above came to"
        assert after == oracle(definition, after)
        counters = run.progress().counters
        fans = {step.name: int(step.parallel) for step in steps if step.parallel}
        assert counters.total == sum(fans.get(name, 1) if after[name] != "skipped" else 1 for name in after)
        assert counters.open == 0


def above_of(steps: tuple[Step, ...]) -> dict[str, set[str]]:
    above: dict[str, set[str]] = {}
    for step in steps:
        above[step.name] = set(step.depends_on).union(*(above[name] for name in step.depends_on))
    return above


def touched(name: str, before: dict[str, str], above: dict[str, set[str]]) -> bool:
    return any(before[up] in ("failed", "cancelled") for up in above[name])


def play(
    system: System, worker: Worker, chance: random.Random, results: dict[tuple[str, int], Any], turn: int
) -> list[tuple[str, int, Any]]:
    """Run all tasks in random order with random outcomes; return the executed steps with their inputs."""
    tried: list[tuple[str, int, Any]] = []
    system.tick(2)
    out: list[Dispatch] = worker.take()
    while out:
        task = out.pop(chance.randrange(len(out)))
        _, payload, context = msgspec.msgpack.decode(task.payload)
        tried.append((context["step"], context["index"], payload["number"]))
        if chance.random() < 0.3:
            worker.fail(task)
        else:
            results[context["step"], context["index"]] = f"{context['step']}.{context['index']} in {turn}"
            worker.succeed(task, result=msgspec.msgpack.encode(results[context["step"], context["index"]]))
        system.tick(2)
        out += worker.take()
    return tried


def states(system: System, run: RunHandle[Any], definition: Definition) -> dict[str, str]:
    (found,) = system.sql("SELECT state FROM orchestrator.runs WHERE id = CAST(:id AS uuid)", id=run.id)
    state = msgspec.msgpack.decode(bytes(found["state"]), type=DagState)
    return {step.name: StepState(value).name.lower() for step, value in zip(definition.steps, state.steps, strict=True)}


def oracle(definition: Definition, found: dict[str, str]) -> dict[str, str]:
    """Return the expected states: what is skipped, given how all else ended."""
    expected: dict[str, str] = {}
    for step in definition.steps:
        upstream = [expected[name] for name in step.depends_on]
        failed = "failed" in upstream
        runs = {
            "all_success": all(state == "success" for state in upstream),
            "all_ended": True,
            "none_failed": not failed,
        }[step.trigger]
        kept = found[step.name] if found[step.name] != "skipped" else "must not be skipped"
        expected[step.name] = kept if runs or found[step.name] == "success" else "skipped"
    return expected
