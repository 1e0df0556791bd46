"""Each approval of a flow is decided once, for any number of concurrent decisions by any call, key or route."""

from __future__ import annotations

import base64
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine

from orchestrator.domain.code.history import SignalReceived
from orchestrator.domain.runs import RunChanges
from orchestrator.errors import ExpressionError, WrongState
from orchestrator.sdk import acting
from orchestrator.sdk.flow.flows import FlowHandle
from orchestrator.store.runs import pending_changes
from tests.integration.flow_stage import Stage
from tests.integration.serving import serving
from tests.integration.stage import System, fresh_system

ASK = {
    "start": "ask",
    "nodes": {
        "ask": {"kind": "approval", "params": {"approval_key": "$shared.review.ok"}},
        "yes": {"kind": "wait_event", "params": {"signal_key": "go"}},
        "no": {"kind": "wait_event", "params": {"signal_key": "go"}},
    },
    "edges": [{"from": "ask", "action": "approved", "to": "yes"}, {"from": "ask", "action": "rejected", "to": "no"}],
}
TABLES = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'orchestrator'"
GUIDE = Path(__file__).parents[2] / "docs" / "security.md"
BELOW = {"start": "legal", "nodes": {"legal": {"kind": "subflow", "subflow": ASK, "post": {"output_key": "legal"}}}}


@pytest.fixture
def stage(system: System) -> Stage:
    return Stage(system)


def post(address: str, path: str, body: Any) -> None:
    request = urllib.request.Request(address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        urllib.request.urlopen(request, timeout=30).close()
    except urllib.error.HTTPError as error:
        with error:
            assert error.code == 409, error.read()
            raise WrongState(json.load(error)["detail"]) from None


def decision_calls(run: FlowHandle, address: str, node: str, key: str) -> list[tuple[str, Callable[[], None]]]:
    """Return twenty decisions, each with the call that makes it."""
    route, signals = f"/api/v1/runs/{run.id}", f"/api/v1/runs/{run.id}/flow/signals/{key.replace('/', '%2F')}"
    task = {"task_id": run.id, "key": key}
    return [
        ("approved", lambda: run.approve(why="approve")),
        ("rejected", lambda: run.reject(why="reject")),
        ("approved", lambda: run.approve(node=node)),
        ("rejected", lambda: run.reject(node=node)),
        ("approved", lambda: run.signal(key)),
        ("rejected", lambda: run.signal(key, False)),
        ("approved", lambda: run.signal("review.ok", "yes")),
        ("rejected", lambda: run.signal("$shared.review.ok", {"approved": 0})),
        ("approved", lambda: post(address, f"{route}/approve", {})),
        ("rejected", lambda: post(address, f"{route}/reject", {"why": "no"})),
        ("approved", lambda: post(address, f"{route}/approve", {"node": node})),
        ("rejected", lambda: post(address, f"{route}/reject", {"node": node})),
        ("approved", lambda: post(address, signals, {"value": "accept"})),
        ("rejected", lambda: post(address, signals, {"value": "denied"})),
        ("approved", lambda: post(address, "/tasks/signal", {**task, "value": True})),
        ("rejected", lambda: post(address, "/tasks/signal", {**task, "value": "no"})),
        ("approved", lambda: post(address, "/tasks/signal", {**task, "key": "review.ok", "value": {"decision": 1}})),
        ("rejected", lambda: post(address, "/tasks/signal", {**task, "key": "review.ok", "value": 0})),
        ("approved", lambda: run.signal(key, 1.0)),
        ("rejected", lambda: run.signal(key, "reject")),
    ]


@pytest.mark.long
@pytest.mark.parametrize("time", range(100))
def test_one_of_twenty_concurrent_decisions_wins_each_time(stage: Stage, time: int) -> None:
    test_one_of_twenty_concurrent_decisions_by_every_route_wins(stage, BELOW if time % 2 else ASK)


@pytest.mark.parametrize("flow", [ASK, BELOW], ids=["alone", "in a subflow"])
def test_one_of_twenty_concurrent_decisions_by_every_route_wins(stage: Stage, flow: dict[str, Any]) -> None:
    flows, above = stage.system.app.flows, "legal/" if flow is BELOW else ""
    flows.publish("many", flow)
    with serving(stage.system.settings) as address:
        run = flows["many"].start()
        stage.run(run, 2)
        people = decision_calls(run, address, f"{above}ask", f"{above}review.ok")
        start, decided, refused = threading.Barrier(len(people)), list[str](), list[str]()

        def decide(what: str, act: Callable[[], None]) -> None:
            start.wait()
            try:
                act()
                decided.append(what)
            except WrongState as error:
                refused.append(str(error))

        threads = [threading.Thread(target=decide, args=one) for one in people]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            stage.system.pass_seconds(after=0.01)
        (said,) = decided
        assert len(refused) == len(people) - 1
        assert not [
            text
            for text in refused
            if "is decided already" not in text and "is not waiting for an approval" not in text
        ]
        stage.run(run, 2)
        standing = (run.cursor(), run.shared())
        assert run.cursor() == above + ("yes" if said == "approved" else "no")
        for _, act in decision_calls(run, address, f"{above}ask", f"{above}review.ok"):  # the decision is final
            with pytest.raises(WrongState):
                act()
        stage.run(run, 2)
        assert (run.cursor(), run.shared()) == standing
    (visit,) = stage.system.sql("SELECT action FROM orchestrator.node_runs WHERE kind = 'approval'")
    lines = stage.system.sql(
        "SELECT act, detail FROM orchestrator.audit WHERE target = :run AND act <> 'signal'", run=run.id
    )
    told = [(line["act"], line["detail"]["decision"], line["detail"]["node"]) for line in lines]
    assert (visit["action"], told) == (said, [(said, said, f"{above}ask")])


def test_signals_neither_overwrite_nor_withdraw_a_decision(stage: Stage) -> None:
    flows = stage.system.app.flows
    flows.publish("ask", ASK)
    run = flows["ask"].start()
    stage.run(run, 2)
    for key, value in (("review", {"ok": "rejected"}), ("review.ok.approved", False), ("$shared.review", None)):
        with pytest.raises(ExpressionError, match=r"would overwrite the decision of approval 'ask'.* 'review\.ok'"):
            run.signal(key, value)
    with pytest.raises(ExpressionError, match="None decides nothing"):
        run.signal("review.ok", None)
    run.signal("review.by", "ann")
    run.signal("review.ok", "yes", why="cheap")
    who = acting.current(stage.system.settings.audit_as).who
    by = rf"approved by {re.escape(who)} at \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC \(cheap\)\."
    with pytest.raises(WrongState, match=f"'review.ok' of run {run.id} is decided already: {by}"):
        run.reject()
    stage.run(run, 2)
    assert (run.cursor(), run.shared()) == ("yes", {"review": {"by": "ann", "ok": "yes"}})
    with pytest.raises(WrongState, match=f"'review.ok' of run {run.id} is decided already: {by}"):
        run.reject(node="ask")
    with pytest.raises(WrongState, match=f"is not waiting for an approval.* Approval 'ask' was {by} To decide"):
        run.reject()


def test_with_data_keys_only_the_audit_log_stores_plain_reasons(
    engine: Engine, database_url: str, redis_url: str
) -> None:
    """As the table in docs/security.md says."""
    keys = f"first:{base64.b64encode(b'1' * 32).decode()}"
    with fresh_system(engine, database_url, redis_url, data_keys=keys) as system:
        stage = Stage(system)
        system.app.flows.publish("ask", ASK)
        run = system.app.flows["ask"].start()
        stage.run(run, 2)
        run.signal("review.by", "xyzzy-value")
        run.approve(why="xyzzy-why")
        tables = [row["table_name"] for row in system.sql(TABLES)]

        def tables_with(word: str) -> set[str]:
            count = "SELECT count(*) AS n FROM orchestrator.{} t WHERE t::text LIKE :plain OR t::text LIKE :hex"
            words = {"plain": f"%{word}%", "hex": f"%{word.encode().hex()}%"}
            return {table for table in tables if system.sql(count.format(table), **words)[0]["n"]}

        assert (tables_with("xyzzy-why"), tables_with("xyzzy-value")) == ({"audit"}, set()), (
            "while the leader has not seen them"
        )
        stage.run(run, 2)
        assert run.cursor() == "yes"
        assert (tables_with("xyzzy-why"), tables_with("xyzzy-value")) == ({"audit"}, set())
    assert "the audit log, with the `why` of decisions" in GUIDE.read_text(encoding="utf-8")


def test_a_decision_not_yet_applied_to_the_run_counts(stage: Stage) -> None:
    flows = stage.system.app.flows
    flows.publish("ask", ASK)
    run = flows["ask"].start()
    stage.run(run, 2)
    decision = RunChanges(facts=[SignalReceived("review.ok", b"")], of_flow=True)
    with stage.system.engine.begin() as connection:
        pending_changes.add(connection, [(UUID(run.id).bytes, decision)])
    with pytest.raises(WrongState, match="decided already: a moment ago"):
        run.signal("review.ok", "no")


def test_a_run_being_cancelled_rejects_decisions_and_signals(stage: Stage) -> None:
    flows = stage.system.app.flows
    flows.publish("ask", ASK)
    run = flows["ask"].start()
    stage.run(run, 2)
    run.cancel()
    acts: list[Callable[[], None]] = [run.approve, lambda: run.signal("go"), lambda: run.signal("review.ok", "no")]
    for act in acts:
        with pytest.raises(WrongState, match="accepts no more signals: it is being cancelled"):
            act()
    stage.run(run, 3)
    assert run.status() == "cancelled"


def test_a_run_ended_by_a_decision_ignores_a_later_cancel(stage: Stage) -> None:
    flows = stage.system.app.flows
    flows.publish("last", {"start": "ask", "nodes": {"ask": {"kind": "approval"}}})
    run = flows["last"].start()
    stage.run(run, 2)
    run.approve()
    run.cancel()
    stage.run(run, 3)
    assert run.status() == "success"
    lines = stage.system.sql("SELECT act FROM orchestrator.audit WHERE target = :run ORDER BY id", run=run.id)
    assert [line["act"] for line in lines][-2:] == ["approved", "cancel"]
