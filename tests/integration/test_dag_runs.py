"""Runs of DAGs: keys and limits, timeouts, outputs, reruns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

import msgspec
import pytest

from orchestrator import Duplicate, Orchestrator, RunHandle
from orchestrator.domain.tasks.task import Dispatch
from orchestrator.sdk.dag.definitions import loads
from orchestrator.store import shards
from orchestrator.store.dag import plans
from orchestrator.store.insights import list_steps
from tests.integration.stage import System, Worker


def apply(system: System, *texts: str) -> None:
    for text in texts:
        system.app.workflows.apply(loads(text))


def begin(system: System, text: str, **params: Any) -> RunHandle[Any]:
    """Apply a workflow, start a run and wait until it has begun."""
    apply(system, text)
    run = system.app.workflows[loads(text).name].start(**params)
    system.pass_seconds()
    return run


def steps_of(taken: list[Dispatch]) -> list[str]:
    """Return the steps of dispatched tasks."""
    return [msgspec.msgpack.decode(task.payload)[2]["step"] for task in taken]


def finish(system: System, worker: Worker, *, fail: tuple[str, ...] = (), **results: Any) -> list[str]:
    """Run dispatched tasks until none follow; return their steps in order."""
    ran: list[str] = []
    system.tick(2)
    while taken := worker.take():
        for task, step in zip(taken, steps_of(taken), strict=True):
            ran.append(step)
            if step in fail:
                worker.fail(task)
            else:
                worker.succeed(task, result=msgspec.msgpack.encode(results.get(step, step)))
        system.tick(2)
    return ran


def row(system: System, run: RunHandle[Any]) -> dict[str, Any]:
    return dict(system.sql("SELECT * FROM orchestrator.runs WHERE id = CAST(:id AS uuid)", id=run.id)[0])


# -- keys and limits


ONE = "tasks: {a: {task: job}}"


def test_idempotency_keys_are_scoped_to_their_workflow(system: System) -> None:
    apply(system, f"name: bill\n{ONE}", f"name: ship\n{ONE}")
    first = {name: system.app.workflows[name].options(key="order-7").start() for name in ("bill", "ship")}
    again = {name: system.app.workflows[name].options(key="order-7").start() for name in ("bill", "ship")}
    assert first["bill"].id != first["ship"].id, "the second workflow starts, too"
    assert {name: run.id for name, run in again.items()} == {name: run.id for name, run in first.items()}
    assert system.count("runs") == 2


def test_a_key_with_different_parameters_is_rejected_as_duplicate(system: System) -> None:
    apply(system, f"name: bill\nparams: {{month: {{}}, size: {{type: number, default: 1}}}}\n{ONE}")
    bill = system.app.workflows["bill"].options(key="order-7")
    first = bill.start(month="may")
    assert bill.start(month="may").id == bill.start(month="may", size=1).id == first.id
    with pytest.raises(Duplicate, match="was started under the key 'order-7' with different parameters") as caught:
        bill.start(month="june")
    assert caught.value.task_id == first.id
    assert system.count("runs") == 1


def test_workflows_never_share_a_concurrency_limit(system: System) -> None:
    text = "name: {}\nparams: {{key: {{}}}}\nconcurrency: {{limit: 1, key: '${{params.key}}'}}\n" + ONE.replace(
        "{", "{{"
    ).replace("}", "}}")
    apply(system, text.format("a"), text.format("a/b"))
    system.worker()
    pairs = [("a", "b/c"), ("a/b", "c"), ("a", "b|c"), ("a/b", "|c"), ("a", "/b/c"), ("a", "b/c")]
    runs = [system.app.workflows[name].start(key=key) for name, key in pairs]
    system.pass_seconds()
    assert [run.progress().status for run in runs] == ["running"] * 5 + ["pending"]


def test_run_ids_of_two_code_workflows_never_collide(system: System) -> None:
    started: list[str] = []
    for name, key in (("a", "b/c"), ("a/b", "c")):
        app = Orchestrator(system.settings)

        @app.workflow(name=name)
        async def flow(ctx: Any) -> None: ...

        started.append(flow.starting(id=key, on_conflict="return").start().id)
        app.close()
    assert len(set(started)) == 2


# -- waiting and timeouts


def test_runs_waiting_for_a_limit_begin_after_a_change_of_shards(system: System) -> None:
    """A leader of one shard learns of free room only when its own runs end; here none does."""
    apply(system, f"name: pair\nconcurrency: 2\n{ONE}")
    runs = [system.app.workflows["pair"].start() for _ in range(5)]
    system.pass_seconds()
    assert [run.progress().status for run in runs] == ["running"] * 2 + ["pending"] * 3
    system.sql("DELETE FROM orchestrator.runs WHERE status = 'running'")  # as if ended on another shard
    for number in (2, 1, 1):
        shards.upgrade(replace(system.settings, shards=number))
    system.lead()
    system.tick()
    assert [run.progress().status for run in runs[2:]] == ["running"] * 2 + ["pending"]


def test_waiting_for_a_limit_does_not_consume_the_run_timeout(system: System) -> None:
    text = f"name: timed\nconcurrency: 1\ntimeout: 1m\n{ONE}"
    first = begin(system, text)
    second = system.app.workflows["timed"].start()
    system.pass_seconds()
    system.sql("UPDATE orchestrator.runs SET deadline = NULL WHERE id = CAST(:id AS uuid)", id=first.id)
    system.lead(offset=3_600)
    system.worker()
    system.pass_seconds(3)
    assert second.progress().status == "pending", "an hour in line is not its own"
    first.cancel()
    system.tick_until(lambda: second.progress().status == "running")
    left = system.sql(
        "SELECT extract(epoch FROM deadline - started_at) AS left FROM orchestrator.runs WHERE id = CAST(:id AS uuid)",
        id=second.id,
    )
    assert float(left[0]["left"]) == pytest.approx(60.0)
    system.lead(offset=3_600 + 61)
    system.tick_until(lambda: second.progress().status == "failed")
    assert row(system, second)["reason"] == "timed out"


def test_a_run_of_the_previous_release_gets_its_full_timeout(system: System) -> None:
    """The previous release writes a deadline and no timeout."""
    apply(system, f"name: older\ntimeout: 1m\n{ONE}")
    run = system.app.workflows["older"].start()
    system.sql(
        "UPDATE orchestrator.runs SET timeout = NULL, created_at = now() - interval '1 hour', "
        "deadline = now() - interval '59 minutes' WHERE id = CAST(:id AS uuid)",
        id=run.id,
    )
    system.pass_seconds(2)
    found = row(system, run)
    assert (found["status"], found["timeout"]) == ("running", 60.0)
    assert (found["deadline"] - found["started_at"]).total_seconds() == pytest.approx(60.0)


# -- outputs


def test_outputs_include_child_workflows_and_empty_fan_outs(system: System) -> None:
    worker = system.worker()
    apply(system, "name: child\nparams: {n: {default: 0}}\ntasks: {x: {task: job}, y: {task: job, depends_on: [x]}}")
    run = begin(
        system,
        """
        name: giving
        params: {none: {default: []}, two: {default: [1, 2]}}
        tasks:
          child:    {workflow: child}
          children: {workflow: child, foreach: params.two, input: {n: "${item}"}}
          nobody:   {workflow: child, foreach: params.none}
          nothing:  {task: job, foreach: params.none}
          single:   {task: job}
          bad:      {task: job}
          never:    {task: job, depends_on: [bad]}
        """,
    )
    finish(system, worker, fail=("bad",), y={"z": 1})
    assert run.outputs(timeout=5) == {
        "child": {"y": {"z": 1}},
        "children": [{"y": {"z": 1}}] * 2,
        "nobody": [],
        "nothing": [],
        "single": "single",
        "bad": None,
    }


# -- reruns


REPEATED = """
name: repeated
tags: [nightly]
tasks:
  bad:   {task: job}
  after: {task: job, depends_on: [bad], trigger: all_ended}
  a:     {task: job}
  b:     {task: job, depends_on: [a]}
  c:     {task: job, depends_on: [b]}
  empty: {task: job, foreach: "[]"}
"""


def test_a_rerun_repeats_a_step_its_successors_and_unsuccessful_steps(system: System) -> None:
    worker = system.worker()
    apply(system, REPEATED)
    run = system.app.workflows["repeated"].options(tags=["manual"]).start()
    system.pass_seconds()
    finish(system, worker, fail=("bad",))
    assert run.progress().status == "failed"
    again = run.rerun(from_step="b")
    system.pass_seconds()
    assert sorted(finish(system, worker)) == ["b", "bad", "c"], "`after` succeeded, and is not below `b`"
    assert again.progress().status == "success"
    assert row(system, again)["tags"] == ["nightly", "manual"]
    assert again.outputs()["after"] == "after"
    assert (again.progress().counters.total, again.progress().counters.open) == (5, 0)
    whole = run.rerun()
    system.pass_seconds()
    assert sorted(finish(system, worker)) == ["a", "after", "b", "bad", "c"]
    assert row(system, whole)["tags"] == ["nightly", "manual"]
    assert UUID(whole.id) != UUID(again.id)


# -- step ends and inputs, as documented


def test_inputs_from_unsuccessful_steps_are_null(system: System) -> None:
    """A partly failed fan-out, an unfinished step, a cancelled step, an error in `when`."""
    worker = system.worker()
    run = begin(
        system,
        """
        name: ends
        params: {list: {default: [0, 1, 2]}}
        tasks:
          part:    {task: job, foreach: params.list, input: {number: "${item}"}}
          gather:  {task: job, depends_on: [part], trigger: all_ended, input: {number: "${part}"}}
          quick:   {task: job}
          slow:    {task: job}
          first: {task: job, depends_on: [quick, slow], trigger: any_success, input: {number: ["${quick}", "${slow}"]}}
          stopped: {task: job}
          alarm:   {task: job, depends_on: [stopped], trigger: any_failed, input: {number: "${stopped}"}}
          below:   {task: job, depends_on: [stopped]}
          wrong:   {task: job, when: "${params.list.none > 1}"}
          after:   {task: job, depends_on: [wrong]}
        """,
    )
    tasks: dict[str, list[Dispatch]] = {}
    for task in worker.take():
        tasks.setdefault(steps_of([task])[0], []).append(task)
    assert sorted(tasks) == ["part", "quick", "slow", "stopped"]
    worker.fail(tasks["part"][1])
    worker.succeed(tasks["part"][0], tasks["part"][2], tasks["quick"][0], result=msgspec.msgpack.encode("x"))
    system.app.handle(str(UUID(bytes=tasks["stopped"][0].id))).cancel()
    system.pass_seconds(2)
    given = {steps_of([task])[0]: msgspec.msgpack.decode(task.payload)[1] for task in worker.take()}
    assert given == {
        "gather": {"number": ["x", None, "x"]},
        "first": {"number": ["x", None]},
        "alarm": {"number": None},
    }
    with system.engine.connect() as connection:
        steps = {step.name: (step.state, step.reason) for step in list_steps(connection, UUID(run.id))}
    assert steps["part"][0] == "failed"
    assert steps["below"] == ("skipped", "all_success: stopped cancelled")
    assert steps["wrong"][0] == "failed"
    assert "'none'" in str(steps["wrong"][1])
    assert steps["after"] == ("skipped", "all_success: wrong failed")


# -- runs planned over several ticks


@pytest.mark.parametrize("forgotten_by", ["another leader", "a rollback"])
def test_steps_left_for_the_next_tick_start_without_the_cached_plan(system: System, forgotten_by: str) -> None:
    """Formerly a report that came first found no step left in the reloaded plan, and the others never began."""
    worker = system.worker(slots=20)
    system.pass_seconds()
    plans = system.scheduler.term.runs.dags
    plans._slice = 1  # so that of eight steps five begin in the first tick
    steps = ", ".join(f"s{number}: {{task: job}}" for number in range(8))
    apply(system, f"name: wide\ntasks: {{{steps}}}")
    run = system.app.workflows["wide"].start()
    system.tick_until(lambda: row(system, run)["expanding"])
    first = worker.take()
    assert 0 < len(first) < 8
    if forgotten_by == "another leader":
        system.lead()
    else:
        plans.rolled_back()
    worker.succeed(first[0])
    system.tick()
    worker.succeed(*first[1:])
    finish(system, worker)
    assert run.status() == "success"
    assert row(system, run)["success"] == 8


@pytest.mark.parametrize(
    ("hooks", "reads"), [("", 1), ("on_failure: [{task: job}]", 1), ("on_success: [{task: job}]", 2)]
)
def test_the_leader_rereads_a_run_only_to_start_its_hooks(
    system: System, monkeypatch: pytest.MonkeyPatch, hooks: str, reads: int
) -> None:
    worker = system.worker()
    loaded: list[bytes] = []
    load = plans.load
    monkeypatch.setattr(plans, "load", lambda connection, ids: loaded.extend(ids) or load(connection, ids))
    run = begin(system, f"name: once\n{hooks}\ntasks: {{a: {{task: job}}, b: {{task: job, depends_on: [a]}}}}")
    for _ in range(2):
        worker.succeed(*worker.take())
        system.tick()
    assert run.status() == "success"
    assert loaded == [UUID(run.id).bytes] * reads
    assert len(worker.take()) == reads - 1
