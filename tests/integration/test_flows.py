"""Runs of flow graphs on a real Postgres and Redis: every kind of node, failures, signals and limits."""

from __future__ import annotations

import random
from typing import Any
from uuid import UUID

import pytest

from orchestrator import Workflow
from orchestrator.errors import ExpressionError, InvalidWorkflow, NotFound, RunFailed, StateTooLarge, WrongState
from orchestrator.sdk.values.payload import decode_call
from orchestrator.store.limits import queues
from tests.integration.flow_stage import EVERY_KIND, Stage
from tests.integration.stage import System


@pytest.fixture
def stage(system: System) -> Stage:
    return Stage(system)


def executor(service: str = "transform", **fields: object) -> dict[str, object]:
    return {"kind": "executor", "exec_type": "local_func", "service": service, **fields}


def test_a_run_visits_every_kind_of_node(stage: Stage) -> None:
    flows = stage.system.app.flows
    assert flows.publish("every", EVERY_KIND) == 1
    run = flows["every"].start(val=10)
    stage.run(run, 5)
    assert (run.status(), run.cursor(), run.shared()) == ("running", "ask", {"doubled": 20})
    run.approve(why="it is cheap")
    stage.run(run, 10)
    assert run.cursor() == "pause"
    run.signal("flag")
    stage.later(61.0)
    assert stage.run(run) == "success"
    assert run.result() == {
        "doubled": 20,
        "ok": "approved",
        "both": [60, 60],
        "each": [600, 600],
        "flag": True,
        "inner": {"total": 1200},
    }
    backend = stage.system.app._client.backend.flows
    seen = [(visit.node, visit.branch, visit.status, visit.action) for visit in backend.node_runs(_raw(run.id))]
    assert seen == [
        ("double", None, "success", "default"),
        ("large", None, "success", "ask"),
        ("ask", None, "success", "approved"),
        ("both", 0, "success", ""),
        ("both", 1, "success", ""),
        ("both", None, "success", "default"),
        ("each", 0, "success", ""),
        ("each", 1, "success", ""),
        ("each", None, "success", "default"),
        ("pause", None, "success", "default"),
        ("wait", None, "success", "default"),
        ("inner/total", None, "success", "default"),
        ("inner", None, "success", "default"),
    ]
    (approval,) = [visit for visit in backend.node_runs(_raw(run.id)) if visit.node == "ask"]
    assert approval.output["why"] == "it is cheap"
    assert "@" in approval.output["by"]
    assert stage.system.count("timers") == 0
    (row,) = stage.system.sql("SELECT total, open, success, failed, cancelled FROM orchestrator.runs")
    assert dict(row) == {"total": 7, "open": 0, "success": 7, "failed": 0, "cancelled": 0}
    acts = {(line["act"], line["kind"]) for line in stage.system.sql("SELECT act, kind FROM orchestrator.audit")}
    assert {("publish", "flow"), ("approved", "run"), ("signal", "run")} <= acts


def _raw(identifier: str) -> bytes:
    return UUID(identifier).bytes


def test_a_node_with_three_retries_has_four_recorded_attempts(stage: Stage) -> None:
    flows = stage.system.app.flows
    flows.publish("flaky", {"start": "a", "nodes": {"a": executor("flaky", max_retries=3, post={"output_key": "x"})}})
    stage.failures = 3
    run = flows["flaky"].start()
    assert stage.run(run) == "success"
    assert run.result() == {"x": "worked"}
    visits = stage.system.app._client.backend.flows.node_runs(_raw(run.id))
    assert [(visit.attempt, visit.status) for visit in visits] == [
        (1, "failed"),
        (2, "failed"),
        (3, "failed"),
        (4, "success"),
    ]
    stage.failures = 4
    run = flows["flaky"].start()
    assert stage.run(run) == "failed"
    with pytest.raises(RunFailed, match="Node 'a': ValueError: flaky says no"):
        run.result()


def test_a_manual_retry_resumes_a_run_at_its_failed_node(stage: Stage) -> None:
    flows = stage.system.app.flows
    nodes = {
        "a": executor(params={"mul": 2}, prep={"input_key": "$params.val"}, post={"output_key": "a"}),
        "b": executor("flaky", post={"output_key": "b"}),
    }
    flows.publish("two", {"start": "a", "nodes": nodes, "edges": [{"from": "a", "to": "b"}]})
    stage.failures = 1
    run = flows["two"].start(val=1)
    assert stage.run(run) == "failed"
    (failed,) = stage.system.sql("SELECT id FROM orchestrator.ended_tasks WHERE name = 'flaky'")
    with pytest.raises(WrongState, match=f"Cannot retry task .* by itself: .* orchestrator runs retry {run.id}"):
        stage.system.app.handle(failed["id"]).retry()  # formerly accepted without effect
    run.retry()
    assert stage.run(run) == "success"
    assert run.result() == {"a": 2, "b": "worked"}
    assert [name for name, _ in stage.calls] == ["transform", "flaky", "flaky"]
    (row,) = stage.system.sql("SELECT total, open, success, failed FROM orchestrator.runs")
    assert dict(row) == {"total": 4, "open": 0, "success": 3, "failed": 1}


def test_running_branches_are_cancelled_when_one_fails(stage: Stage) -> None:
    flows = stage.system.app.flows
    node = {
        "kind": "parallel",
        "exec_type": "local_func",
        "parallel_services": ["bad", "job", "job"],
        "parallel_mode": "concurrent",
        "post": {"output_key": "x"},
    }
    flows.publish("fast", {"start": "p", "nodes": {"p": node}})
    run = flows["fast"].start()
    stage.system.pass_seconds()
    taken = stage.worker.take()
    assert sorted(task.name for task in taken) == ["bad", "job", "job"]
    stage.worker.fail(*(task for task in taken if task.name == "bad"))
    stage.system.pass_seconds()
    assert run.status() == "failed"
    (row,) = stage.system.sql("SELECT total, open, success, failed, cancelled FROM orchestrator.runs")
    assert dict(row) == {"total": 4, "open": 0, "success": 0, "failed": 2, "cancelled": 2}


@pytest.mark.parametrize("mode", ["sequential", "concurrent"])
@pytest.mark.parametrize("strategy", ["fail_fast", "collect_errors", "ignore_errors", "continue"])
def test_failure_strategies_work_in_both_modes(stage: Stage, mode: str, strategy: str) -> None:
    flows = stage.system.app.flows
    node = {
        "kind": "parallel",
        "exec_type": "local_func",
        "parallel_services": ["bad", "route"],
        "parallel_mode": mode,
        "failure_strategy": strategy,
        "post": {"output_key": "x"},
    }
    flows.publish("strategies", {"start": "p", "nodes": {"p": node}})
    run = flows["strategies"].start()
    ended = stage.run(run)
    called = [name for name, _ in stage.calls]
    if strategy in ("ignore_errors", "continue"):
        assert (ended, run.result()) == ("success", {"x": [None, {"action": "default"}]})
    else:
        assert ended == "failed"
        assert called == (["bad"] if (mode, strategy) == ("sequential", "fail_fast") else ["bad", "route"])


def test_a_wait_without_a_signal_costs_nothing_and_times_out(stage: Stage) -> None:
    flows = stage.system.app.flows
    node = {"kind": "wait_event", "params": {"signal_key": "$shared.flag", "timeout_ms": 30_000}}
    flows.publish("wait", {"start": "w", "nodes": {"w": node}})
    run = flows["wait"].start()
    stage.run(run, 3)
    assert (run.status(), stage.system.count("tasks"), stage.system.count("timers")) == ("running", 0, 1)
    stage.later(31.0)
    assert stage.run(run, 3) == "failed"
    with pytest.raises(RunFailed, match="Nobody sent 'flag'"):
        run.result()
    with pytest.raises(WrongState, match="accepts no more signals"):
        run.signal("flag")


def test_a_signal_sent_before_the_run_begins_counts(stage: Stage) -> None:
    flows = stage.system.app.flows
    node = {"kind": "wait_event", "params": {"signal_key": "$shared.flag"}, "post": {"output_key": "got"}}
    flows.publish("early", {"start": "w", "nodes": {"w": node}})
    run = flows["early"].start()
    run.signal("flag", {"n": 1})
    assert stage.run(run) == "success"
    assert run.result() == {"flag": {"n": 1}, "got": {"n": 1}}


def test_a_signal_to_a_failing_run_is_kept_for_its_retry(stage: Stage) -> None:
    flows = stage.system.app.flows
    flows.publish("late", {"start": "a", "nodes": {"a": executor("flaky", post={"output_key": "got"})}})
    stage.failures = 1
    run = flows["late"].start()
    stage.system.pass_seconds(2)
    assert stage.work() == 1  # the task fails; the leader does not know yet
    run.signal("flag", {"n": 1})
    stage.system.pass_seconds(2)
    assert run.status() == "failed"
    run.retry()
    assert stage.run(run) == "success"
    assert run.result() == {"flag": {"n": 1}, "got": "worked"}


def test_signals_too_large_for_a_waiting_run_are_rejected(stage: Stage) -> None:
    flows = stage.system.app.flows
    wait = {"kind": "wait_event", "params": {"signal_key": "$shared.flag"}}
    flows.publish("waits", {"start": "w", "nodes": {"w": wait}})
    run = flows["waits"].start()
    stage.run(run, times=3)
    text = "x" * 400_000
    sent = 0
    with pytest.raises(StateTooLarge, match=r"Signal 'k\d' cannot be kept: .*up to 3,000,000"):
        for sent in range(9):
            run.signal(f"k{sent}", text)
            stage.system.pass_seconds(sent % 2)  # some signals are still in the inbox
    assert sent == 3
    run.signal("k0", text)  # replaces an earlier signal
    run.signal("k1", None)
    stage.system.pass_seconds()
    run.signal("flag", text)
    assert stage.run(run) == "success"


def test_a_run_is_cancelled_wherever_it_stands(stage: Stage) -> None:
    flows = stage.system.app.flows
    flows.publish("every", EVERY_KIND)
    waiting, working = flows["every"].start(val=10), flows["every"].start(val=2)
    stage.run(waiting, 4)
    another = flows["every"].start(val=1)
    stage.system.pass_seconds()
    for run in (waiting, working, another):
        run.cancel()
    stage.system.tick_until(lambda: {run.status() for run in (waiting, working, another)} == {"cancelled"})
    assert stage.system.count("tasks") == stage.system.count("timers") == 0
    rows = stage.system.sql(
        "SELECT open, total - success - failed - cancelled - skipped AS rest FROM orchestrator.runs"
    )
    assert {tuple(row.values()) for row in rows} == {(0, 0)}
    backend = stage.system.app._client.backend.flows
    ended = {one.id: backend.node_runs(_raw(one.id))[-1] for one in (waiting, working, another)}
    assert {visit.status for visit in ended.values()} == {"cancelled"}
    assert (ended[waiting.id].node, ended[waiting.id].kind) == ("ask", "approval")
    assert backend.node_runs(_raw(waiting.id), ended[waiting.id].number) == []


def test_signals_without_a_decision_or_a_valid_key_are_rejected(stage: Stage) -> None:
    flows = stage.system.app.flows
    ask = {
        "start": "ask",
        "nodes": {"ask": {"kind": "approval"}},
        "edges": [{"from": "ask", "action": "later", "to": ""}],
    }
    flows.publish("ask", ask)
    run = flows["ask"].start()
    stage.run(run, 2)
    run.signal("v", 3)
    stage.run(run, 2)
    for value in (["rejected"], 2, {"by": "Ann"}, "rejected.", {"approved": "perhaps"}):
        with pytest.raises(ExpressionError, match="decides nothing"):
            run.signal("ask", value)
    for key, why in (("$params.x", "expected a key of the shared state"), ("v.w", "'v' is a number, and no mapping")):
        with pytest.raises(ExpressionError, match=why):
            run.signal(key, 1)
    run.signal("ask", {"decision": "later"})
    assert stage.run(run) == "success"


def test_a_loop_ends_at_its_limit_with_a_small_run_row(stage: Stage) -> None:
    flows = stage.system.app.flows
    count = {"kind": "choice", "choice_cases": [{"action": "on", "expr": {"ne": ["$params.stop", True]}}]}
    loop = {
        "start": "a",
        "max_steps": 3_000,
        "nodes": {"a": count},
        "edges": [{"from": "a", "action": "on", "to": "a"}],
    }
    flows.publish("loop", loop)
    run = flows["loop"].start()
    assert stage.run(run, 200) == "failed"
    with pytest.raises(RunFailed, match="It has visited 3,000 nodes"):
        run.result()
    (row,) = stage.system.sql("SELECT octet_length(state) AS size FROM orchestrator.runs")
    assert row["size"] < 500
    assert stage.system.count("node_runs") == 3_000
    assert stage.system.app._client.backend.flows.visited(_raw(run.id)) == ["a"]


def test_published_versions_are_immutable_and_runs_keep_theirs(stage: Stage) -> None:
    flows = stage.system.app.flows
    one = {"start": "a", "nodes": {"a": executor(params={"mul": 2}, prep={"input_key": "$params.val"})}}
    one["nodes"]["a"]["post"] = {"output_key": "x"}  # type: ignore[index]
    two = {**one, "nodes": {"a": {**one["nodes"]["a"], "params": {"mul": 3}}}}  # type: ignore[index]
    assert (flows.publish("v", one), flows.publish("v", one)) == (1, 1)
    run = flows["v"].start(val=1)
    assert flows.publish("v", two) == 2
    stage.run(run)
    assert run.result() == {"x": 2}
    newest, chosen = flows["v"].start(val=1), flows["v"].options(version=1).start(val=1)
    stage.run(newest), stage.run(chosen)
    assert (newest.result(), chosen.result()) == ({"x": 3}, {"x": 2})
    with pytest.raises(InvalidWorkflow, match="There is a workflow 'dag'"):
        stage.system.app.workflows.apply(_dag())
        flows.publish("dag", one)
    with pytest.raises(InvalidWorkflow, match="There is a flow 'v'"):
        stage.system.app.workflows.apply(_dag("v"))
    with pytest.raises(NotFound, match="There is no flow 'w'"):
        flows["w"].start()


def test_a_version_keeps_the_failure_rule_of_its_publication(stage: Stage) -> None:
    app = stage.system.app
    backend: Any = app._client.backend.flows
    shop = {
        "start": "charge",
        "nodes": {"charge": executor("bad"), "ship": executor("route", post={"output_key": "shipped"})},
        "edges": [{"from": "charge", "to": "ship"}],
    }
    # as the endpoints in `orchestrator/api/routes/flow_seed.py` do
    backend.publish("shop", app.flows.read(shop), rule="default")
    assert (app.flows.publish("shop", shop), app.flows.publish("shop", shop)) == (2, 2)
    assert backend.publish("shop", app.flows.read(shop), 1).created is False
    ends = {version: app.flows["shop"].options(version=version).start() for version in (1, 2)}
    assert [stage.run(ends[version]) for version in (1, 2)] == ["success", "failed"]
    assert ends[1].shared()["shipped"] == {"action": "default"}
    assert ends[1].shared()["_error"]["node"] == "charge"
    (visit,) = backend.node_runs(_raw(ends[2].id))
    assert (visit.node, visit.status, visit.action) == ("charge", "failed", "")
    for version in (1, 2):
        inner = {"kind": "subflow", "subflow": {"flow": "shop", "version": version}}
        app.flows.publish("mall", {"start": "shop", "nodes": {"shop": inner}})
        run = app.flows["mall"].start()
        assert stage.run(run) == ("success" if version == 1 else "failed")


def test_an_unknown_parameter_is_rejected(stage: Stage) -> None:
    app = stage.system.app
    app.task(name="price")(lambda items: items)
    known = {"start": "a", "nodes": {"a": {"exec_type": "local_func", "func": "price"}}}
    app.flows.publish("known", known)
    with pytest.raises(InvalidWorkflow, match="no parameter 'itmes'. Did you mean 'items'.* parameters: items"):
        app.flows["known"].start(itmes=[1])
    app.flows["known"].start(items=[1])
    backend: Any = app._client.backend.flows
    backend.publish("older", app.flows.read(known), rule="default")
    app.flows["older"].start(itmes=[1])


def test_a_workflow_and_a_flow_may_share_an_older_name(stage: Stage) -> None:
    flows, workflows = stage.system.app.flows, stage.system.app.workflows
    one = {"start": "a", "nodes": {"a": executor(params={"mul": 2}, prep={"input_key": "$params.val"})}}
    two = {"start": "a", "nodes": {"a": executor(params={"mul": 3}, prep={"input_key": "$params.val"})}}
    flows.publish("old", one)
    workflows.apply(_dag("new"))
    stage.system.sql(
        "UPDATE orchestrator.workflows SET name = 'old', definition = jsonb_set(definition, '{name}', '\"old\"')"
    )
    assert flows.publish("old", one) == 1
    assert flows.publish("old", two) == 2
    again = _dag("old")
    again.task("b", "job", depends_on=["a"])
    workflows.apply(again)
    run = flows["old"].start(val=1)
    assert stage.run(run) == "success"
    other = workflows["old"].start()
    stage.system.tick_until(lambda: other.progress().counters.total == 2)
    stage.system.app._client.backend.workflows.delete("old")
    with pytest.raises(InvalidWorkflow, match="There is a flow 'old'"):
        workflows.apply(again)


def _dag(name: str = "dag") -> Workflow:
    workflow = Workflow(name)
    workflow.task("a", "job")
    return workflow


def test_a_flow_nested_by_name_keeps_its_pinned_version(stage: Stage) -> None:
    flows = stage.system.app.flows
    inner = {"start": "a", "nodes": {"a": executor(params={"mul": 2}, prep={"input_key": "$input"})}}
    inner["nodes"]["a"]["post"] = {"output_key": "x"}  # type: ignore[index]
    flows.publish("inner", inner)
    inner["nodes"]["b"] = {"kind": "choice", "choice_cases": [{"action": "end", "expr": {"gt": ["$shared.x", 0]}}]}  # type: ignore[index]
    inner["edges"] = [{"from": "a", "to": "b"}]  # type: ignore[list-item]
    flows.publish("inner", inner)
    node = {"kind": "subflow", "subflow": "inner", "prep": {"input_key": "$params.val"}, "post": {"output_key": "sub"}}
    flows.publish("outer", {"start": "s", "nodes": {"s": node}})
    flows.publish("inner", {**inner, "max_steps": 5})
    run = flows["outer"].start(val=4)
    assert stage.run(run) == "success"
    assert run.result() == {"sub": {"x": 8}}
    assert flows["outer"].definition().nodes["s"].subflow.version == 2  # type: ignore[union-attr]


def test_nodes_of_the_longest_names_run(stage: Stage) -> None:
    """Random characters of four bytes each, which no index can compress."""
    chance = random.Random(1)
    keys = ["".join(chr(chance.randrange(0x20000, 0x2A000)) for _ in range(124)) for _ in range(4)]
    flow: dict[str, Any] = {"start": keys[0], "nodes": {keys[0]: executor("route")}}
    for key in keys[1:]:
        flow = {"start": key, "nodes": {key: {"kind": "subflow", "subflow": flow}}}
    stage.system.app.flows.publish("long", flow)
    run = stage.system.app.flows["long"].start()
    assert stage.run(run) == "success"
    (row,) = stage.system.sql("SELECT step FROM orchestrator.ended_tasks")
    assert row["step"] == "flow:" + "/".join(reversed(keys))


def test_tasks_keep_their_own_limits_retries_and_queue(stage: Stage) -> None:
    app = stage.system.app
    app.task(name="limited", queue="slow", concurrency=2, retries=4)(lambda params: params)
    node = {"kind": "foreach", "exec_type": "local_func", "func": "limited", "prep": {"input_key": "$params.list"}}
    app.flows.publish("limits", {"start": "f", "nodes": {"f": {**node, "parallel_mode": "concurrent"}}})
    app.flows["limits"].start(list=[1, 2, 3])
    stage.system.pass_seconds()
    rows = stage.system.sql("SELECT queue, lane, options->'retry'->>'max' AS retries, step FROM orchestrator.tasks")
    assert [tuple(row.values()) for row in rows] == [("slow", "limited|", "4", "flow:f")] * 3
    app.flows.publish("once", {"start": "f", "nodes": {"f": {**node, "max_retries": 0, "queue": "reports"}}})
    app.flows["once"].start(list=[1])
    stage.system.pass_seconds()
    (row,) = stage.system.sql("SELECT options FROM orchestrator.tasks WHERE queue = 'reports'")
    assert (row["options"].get("retry") or {}).get("max", 0) == 0
    with stage.system.engine.connect() as connection:
        assert {"slow", "reports"} <= queues.of_workflows(connection)


def test_an_idempotency_key_starts_one_run(stage: Stage) -> None:
    flows = stage.system.app.flows
    flows.publish("every", EVERY_KIND)
    first, second = (flows["every"].options(key="k").start(val=1) for _ in range(2))
    assert first.id == second.id


def test_too_large_input_fails_its_node(stage: Stage) -> None:
    flows = stage.system.app.flows
    node = executor("job", prep={"input_map": {"a": "$params.big", "b": "$params.big", "c": "$params.big"}})
    flows.publish("large", {"start": "a", "nodes": {"a": node}})
    run = flows["large"].start(big="x" * 600_000)
    assert stage.run(run, 3) == "failed"
    with pytest.raises(RunFailed, match="Its input has"):
        run.result()


@pytest.mark.parametrize("parallel", [False, True])
def test_a_run_with_too_large_state_fails_naming_the_node(stage: Stage, parallel: bool) -> None:
    flows = stage.system.app.flows
    big = executor(params={"mul": 900_000}, prep={"input_key": "$params.val"})
    if parallel:
        every = {"kind": "parallel", "parallel_mode": "concurrent", "parallel_services": ["transform"] * 6}
        nodes = {"n0": {**big, **every, "post": {"output_key": "all"}}}
    else:
        nodes = {f"n{number}": {**big, "post": {"output_key": f"doc{number}"}} for number in range(6)}
    edges = [{"from": f"n{number}", "to": f"n{number + 1}"} for number in range(len(nodes) - 1)]
    flows.publish("much", {"start": "n0", "nodes": nodes, "edges": edges})
    run = flows["much"].start(val="x")
    assert stage.run(run) == "failed"
    with pytest.raises(RunFailed, match=rf"Node '{'n0' if parallel else 'n4'}': The run would have to remember"):
        run.result()
    assert {**stage.system.sql("SELECT open FROM orchestrator.runs")[0]} == {"open": 0}


def test_a_retried_list_shows_each_item_under_its_own_number(stage: Stage) -> None:
    flows = stage.system.app.flows
    node: dict[str, object] = {"kind": "parallel", "exec_type": "local_func", "parallel_services": ["sum", "flaky"]}
    node |= {"parallel_mode": "concurrent", "prep": {"input_key": "$params.list"}, "post": {"output_key": "x"}}
    flows.publish("again", {"start": "p", "nodes": {"p": node}})
    stage.failures = 1
    run = flows["again"].start(list=[1, 2])
    assert stage.run(run) == "failed"
    run.retry()
    assert stage.run(run) == "success"
    assert run.result() == {"x": [3, "worked"]}
    assert sorted(name for name, _ in stage.calls) == ["flaky", "flaky", "sum"]
    visits = stage.system.app._client.backend.flows.node_runs(_raw(run.id))
    assert [visit.branch for visit in visits if visit.number == 2] == [1, None]


def test_a_function_receives_only_its_parameters_and_its_input(stage: Stage) -> None:
    app = stage.system.app

    @app.task(name="takes")
    def takes(rate: int) -> int:
        return rate

    node = {"exec_type": "local_func", "func": "takes", "prep": {"input_key": "$params.val"}}
    later = {"kind": "choice", "prep": {"input_key": "$params.all"}, "default_action": "on"}
    app.flows.publish("takes", {"start": "a", "nodes": {"a": node, "b": later}, "edges": [{"from": "a", "to": "b"}]})
    app.flows["takes"].start(val=1, rate=2, all="x" * 1_000)
    stage.system.pass_seconds()
    ((_, given, _),) = [
        decode_call(row["payload"]) for row in stage.system.sql("SELECT payload FROM orchestrator.tasks")
    ]
    assert given == {"rate": 2, "input": 1}
