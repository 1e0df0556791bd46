"""Handles of flow runs: their own and the common methods; and the page of a retried run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from orchestrator.cli.flow import commands
from orchestrator.errors import WrongState
from orchestrator.sdk.flow.flows import FlowHandle
from orchestrator.trace_context import set_trace
from tests.integration.api_client import ApiClient
from tests.integration.flow_stage import Stage
from tests.integration.stage import System
from tests.waiting import eventually

ASK: dict[str, Any] = {"start": "ask", "nodes": {"ask": {"kind": "approval"}}}


@pytest.fixture
def run(system: System) -> FlowHandle:
    system.app.flows.publish("ask", ASK)
    run = system.app.flows["ask"].options(tags=["mine"]).start(amount=5)
    system.pass_seconds(2)
    return run


def test_a_run_belongs_to_the_trace_of_its_start(system: System) -> None:
    system.app.flows.publish("ask", ASK)
    caller = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    set_trace(caller)
    try:
        started = system.app.flows["ask"].start()
        started.rerun()
    finally:
        set_trace(None)
    assert [row["trace"] for row in system.sql("SELECT trace FROM orchestrator.runs ORDER BY id")] == [caller, caller]


async def _first(run: FlowHandle) -> Any:
    return [one async for one in run.aiter_results(0)]


def test_a_flow_run_has_no_list_of_results(run: FlowHandle) -> None:
    ways: dict[str, Callable[[], Any]] = {
        "results": lambda: run.results(0),
        "with exceptions": lambda: run.results(0, return_exceptions=True),
        "iter_results": lambda: list(run.iter_results(0)),
        "outputs": lambda: run.outputs(0),
        "aresults": lambda: asyncio.run(run.aresults(0)),
        "aoutputs": lambda: asyncio.run(run.aoutputs(0)),
        "aiter_results": lambda: asyncio.run(_first(run)),
    }
    for name, ask in ways.items():
        with pytest.raises(WrongState) as refused:
            ask()
        assert f"{run.id}> is a run of a flow, which has no list of results" in str(refused.value), name
        assert "Use result()" in str(refused.value), name


def test_a_flow_run_supports_the_common_run_methods(system: System, run: FlowHandle) -> None:
    assert (run.status(), run.progress().counters.open, run.logs()) == ("running", 1, [])
    run.approve()
    system.pass_seconds(2)
    assert run.wait_ended(0) == "success"
    assert (run.status(), run.progress().fraction) == ("success", 1.0)
    with pytest.raises(WrongState, match="is in state 'success'"):
        run.cancel()
    with pytest.raises(WrongState, match="is in state 'success'"):
        run.retry()


def test_a_flow_rerun_keeps_its_parameters_version_and_tags(system: System, run: FlowHandle) -> None:
    run.reject()
    system.pass_seconds(2)
    system.app.flows.publish("ask", {**ASK, "description": "another version"})
    again, once_more = run.rerun(), asyncio.run(run.arerun())
    assert len({run.id, again.id, once_more.id}) == 3
    system.pass_seconds(2)
    for one in (again, once_more):
        assert isinstance(one, FlowHandle)
        one.approve()
    system.pass_seconds(2)
    results = [one.result(0) for one in (run, again, once_more)]
    assert results == [{"ask": "rejected"}, {"ask": "approved"}, {"ask": "approved"}]
    rows = system.sql("SELECT version, params, tags, flow, status FROM orchestrator.runs ORDER BY id")
    assert [dict(row) for row in rows] == [
        {"version": 1, "params": {"amount": 5}, "tags": ["mine"], "flow": True, "status": "success"}
    ] * 3
    with pytest.raises(WrongState, match="is a run of a flow, which always starts at the beginning: omit the step"):
        run.rerun("ask")


@pytest.mark.parametrize("way", ["database", "http"], scope="module")
def test_watching_a_flow_prints_each_node_and_the_end(
    system: System,
    in_empty_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    del in_empty_folder  # there the command finds the test servers
    monkeypatch.setattr(commands, "_POLL_INTERVAL", 90.0)  # without notifications, the test would time out
    nodes = {"ask": {"kind": "approval"}, "then": {"kind": "approval"}}
    edges = [{"from": "ask", "action": "approved", "to": "then"}]
    system.app.flows.publish("two", {"start": "ask", "nodes": nodes, "edges": edges})
    run = system.app.flows["two"].start()
    system.pass_seconds(2)
    out = err = ""

    def is_printed(text: str) -> bool:
        nonlocal out, err
        system.pass_seconds()
        more = capsys.readouterr()
        out, err = out + more.out, err + more.err
        return text in out + err

    with ThreadPoolExecutor(1) as threads:
        watching = threads.submit(commands._follow, UUID(run.id))
        eventually(lambda: is_printed("ask waits for a signal 'ask'"), "it waits", 60)
        run.approve()
        eventually(lambda: is_printed("ask  success → approved"), "the first has ended", 60)
        eventually(lambda: is_printed("then waits for a signal 'then'"), "it waits again", 60)
        run.approve()
        eventually(lambda: is_printed("then  success → approved"), "the second has ended", 60)
        assert watching.result(60) == 0
    is_printed("")
    assert err.endswith("success\n")


def test_the_page_of_a_retried_run_shows_its_latest_visits(system: System) -> None:
    case = {"action": "out", "expr": {"eq": ["$shared.never", True]}}
    node = {"kind": "choice", "choice_cases": [case], "default_action": "again"}
    edges = [{"from": "turn", "action": "again", "to": "turn"}, {"from": "turn", "action": "out", "to": ""}]
    graph = {"start": "turn", "nodes": {"turn": node}, "edges": edges, "max_steps": 310}
    system.app.flows.publish("turns", graph)
    run = system.app.flows["turns"].start()
    stage = Stage(system)
    assert stage.run(run) == "failed"
    run.retry()
    system.tick_until(lambda: run.status() == "running")
    assert stage.run(run) == "failed"
    (row,) = system.sql("SELECT max(number) AS last FROM orchestrator.node_runs")
    assert row["last"] == 620
    page = ApiClient(system.settings).send("GET", f"/ui/runs/{run.id}")
    assert page.status_code == 200
    assert "The first 320 of 620 visits are not shown" in page.text
