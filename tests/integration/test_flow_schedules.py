"""Schedules that start flows, in all the ways in which they are set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from click.testing import CliRunner

from orchestrator import InvalidWorkflow, NotFound, WorkflowContext
from orchestrator.cli import main
from orchestrator.sdk.dag import definitions
from orchestrator.sdk.flow.builder import FlowGraph
from orchestrator.sdk.flow.flows import FlowHandle
from tests.integration.api_client import ApiClient
from tests.integration.stage import System

DAY = 86_400.0
"""Schedules here fire at midnight, so that no fire comes by itself while a test runs."""
ASK: dict[str, Any] = {"start": "ask", "nodes": {"ask": {"kind": "approval"}}}


@pytest.fixture(autouse=True)
def ask(system: System) -> None:
    assert system.app.flows.publish("ask", ASK) == 1


def runs(system: System) -> list[dict[str, Any]]:
    found = system.sql("SELECT * FROM orchestrator.runs ORDER BY fire_time, id")
    return [dict(row) for row in found]


def publish_again(system: System) -> None:
    assert system.app.flows.publish("ask", {**ASK, "description": "another version"}) == 2


def pass_days(system: System, days: int) -> None:
    system.lead(offset=days * DAY)
    system.pass_seconds(2)


def approve_all(system: System) -> None:
    for run in runs(system):
        if run["status"] == "running":
            system.app.flows.run(run["id"]).approve()
    system.pass_seconds(2)


def test_each_fire_starts_a_run_of_the_version_that_is_published_then(system: System) -> None:
    params = {"due": "${run.fire_time}", "number": 7}
    system.app.schedules.set("ask", every="24h", params=params)
    system.app.schedules.set("ask", "fixed", every="24h", version=1)
    pass_days(system, 1)
    approve_all(system)
    publish_again(system)
    pass_days(system, 2)
    found = runs(system)
    assert {(run["workflow"], run["flow"]) for run in found} == {("ask", True)}
    assert sorted((run["schedule"], run["version"], run["status"]) for run in found) == [
        ("ask/default", 1, "success"),
        ("ask/default", 2, "running"),
        ("ask/fixed", 1, "running"),
        ("ask/fixed", 1, "success"),
    ]
    (first, *_) = [run for run in found if run["schedule"] == "ask/default"]
    assert first["params"] == {"due": first["fire_time"].isoformat(), "number": 7}
    stored = system.app.schedules["ask/default"].status()
    assert (stored.fired, stored.error, stored.flow, stored.flow_version) == (2, None, True, None)
    assert system.app.schedules["ask/fixed"].status().flow_version == 1


def test_overlap_holds_for_flows(system: System) -> None:
    for overlap in ("skip", "queue", "cancel_previous"):
        system.app.schedules.set("ask", overlap, every="24h", overlap=overlap)
    pass_days(system, 1)
    pass_days(system, 2)
    states = {
        name: [run["status"] for run in runs(system) if run["schedule"] == f"ask/{name}"]
        for name in ("skip", "queue", "cancel_previous")
    }
    assert states == {
        "skip": ["running"],
        "queue": ["running", "pending"],
        "cancel_previous": ["cancelled", "running"],
    }
    approve_all(system)
    system.tick_until(lambda: [one["status"] for one in runs(system) if one["schedule"] == "ask/queue"][1] == "running")


def test_a_backfill_starts_flows_a_few_at_a_time(system: System) -> None:
    system.app.schedules.set("ask", every="24h", params={"due": "${run.fire_time}"}, version=1)
    publish_again(system)
    backfill = system.app.schedules["ask"].backfill("2026-01-01", "2026-01-04", concurrency=2)
    system.pass_seconds(2)
    assert [run["status"] for run in runs(system)] == ["running", "running", "pending"]
    for _ in range(2):
        approve_all(system)
    system.tick_until(lambda: backfill.progress().is_over)
    view = backfill.progress()
    assert (view.started, view.failed) == (3, 0)
    assert [(run["version"], run["params"]["due"][:10]) for run in runs(system)] == [
        (1, "2026-01-01"),
        (1, "2026-01-02"),
        (1, "2026-01-03"),
    ]


def test_a_run_can_be_started_at_once(system: System) -> None:
    system.app.schedules.set("ask", every="24h", version=1)
    publish_again(system)
    run = system.app.schedules["ask"].trigger()
    assert isinstance(run, FlowHandle)
    system.pass_seconds(2)
    run.approve()
    system.pass_seconds(2)
    assert run.result(0) == {"ask": "approved"}
    assert [one["version"] for one in runs(system)] == [1]


def test_what_cannot_be_scheduled_is_refused(system: System) -> None:
    @system.app.workflow(name="by-code")
    async def by_code(ctx: WorkflowContext) -> None: ...

    system.app.workflows.apply(definitions.from_data({"name": "steps", "tasks": {"only": {"task": "job"}}}))
    schedules = system.app.schedules
    with pytest.raises(NotFound, match=r"Flow 'ask' has no version 9; the newest is 1\."):
        schedules.set("ask", every="24h", version=9)
    with pytest.raises(NotFound, match=r"no workflow 'asc', and no published flow\. Did you mean 'ask'\?"):
        schedules.set("asc", every="24h")
    with pytest.raises(InvalidWorkflow, match="'steps' is a workflow, of which a schedule starts the newest version"):
        schedules.set("steps", every="24h", version=1)
    with pytest.raises(InvalidWorkflow, match="'by-code' is a workflow as code"):
        schedules.set("by-code", every="24h", version=1)
    with pytest.raises(InvalidWorkflow, match="nothing"):
        schedules.set("ask", every="24h", params={"due": "${run.nothing}"})
    assert system.count("schedules") == 0


# -- files


def test_a_flow_may_have_a_schedule_in_its_file(system: System, tmp_path: Path) -> None:
    file = tmp_path / "daily.yaml"
    body = "start: ask\nnodes: {ask: {kind: approval}}\n"
    file.write_text(body + "schedule: {every: 24h, params: {due: '${run.fire_time}'}}\n")
    assert system.app.flows.publish("daily", file) == 1
    stored = system.app.schedules["daily"].status()
    assert (stored.flow, stored.declared, stored.schedule.every) == (True, True, DAY)
    pass_days(system, 1)
    assert [run["workflow"] for run in runs(system)] == ["daily"]

    file.write_text(body + "schedule: {every: 48h}\n")
    assert system.app.flows.publish("daily", file) == 1  # it is no part of the version
    assert system.app.schedules["daily"].status().schedule.every == 2 * DAY
    (row,) = system.sql("SELECT definition FROM orchestrator.flows WHERE name = 'daily'")
    assert "schedule" not in row["definition"]
    file.write_text(body)
    system.app.flows.publish("daily", file)
    assert "daily/default" not in system.app.schedules.names()


def test_a_flow_built_in_python_may_have_one(system: System) -> None:
    graph = FlowGraph(start="ask", schedule={"cron": "0 3 * * *"}).approval("ask")
    system.app.flows.publish("built", graph)
    assert system.app.schedules["built"].status().schedule.cron == "0 3 * * *"


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (
            "schedule: {every: 24h, cron: 0 3 * * *}",
            "daily.yaml:3: schedule: expected exactly one of cron, every and at",
        ),
        ("schedule:\n  cron: 0 3 * * *\n  timezone: Mars", "daily.yaml:5: schedule.timezone: unknown time zone 'Mars'"),
        ("schedule: often", "daily.yaml:3: schedule: expected a mapping"),
        ("shedule: {every: 24h}", "daily.yaml:3: A flow has no 'shedule'. Did you mean 'schedule'?"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_told_with_its_line(
    system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("daily.yaml").write_text(f"start: ask\nnodes: {{ask: {{kind: approval}}}}\n{written}\n")
    with pytest.raises(InvalidWorkflow) as refused:
        system.app.flows.publish("daily", "daily.yaml")
    assert told in str(refused.value)


def test_only_a_flow_of_its_own_has_a_schedule(system: System) -> None:
    inner = {**ASK, "schedule": {"every": "24h"}}
    with pytest.raises(InvalidWorkflow, match="A flow has no 'schedule'"):
        system.app.flows.publish("outer", {"start": "in", "nodes": {"in": {"kind": "subflow", "subflow": inner}}})


# -- the other doors


def test_from_the_command_line(system: System, in_empty_folder: Path) -> None:
    def run(*words: str, exit_code: int = 0) -> str:
        result = CliRunner().invoke(main, words)
        assert result.exit_code == exit_code, result.output
        return result.output

    assert "ask/default: next fire" in run("schedules", "set", "ask", "--every", "24h", "--version", "1")
    assert "flow ask, version 1" in run("schedules", "show", "ask")
    shown = json.loads(run("schedules", "show", "ask", "--json"))
    assert (shown["flow"], shown["flow_version"]) == (True, 1)
    run("schedules", "set", "ask", "--every", "24h")
    assert "flow ask, its newest published version" in run("schedules", "show", "ask")
    assert "has no version 9" in run("schedules", "set", "ask", "--every", "24h", "--version", "9", exit_code=1)
    started = UUID(run("schedules", "trigger", "ask").strip())
    assert [one["id"] for one in runs(system)] == [started]


def test_over_http(system: System) -> None:
    server = ApiClient(system.settings)
    answer = server.send("PUT", "/api/v1/schedules/ask", json={"schedule": {"every": "24h"}, "version": 1})
    assert (answer.status_code, answer.json()["flow"], answer.json()["version"]) == (200, True, 1)
    answer = server.send("PUT", "/api/v1/schedules/ask", json={"schedule": {"every": "24h"}, "version": 9})
    assert answer.status_code == 404
    assert server.send("POST", "/api/v1/schedules/ask/default/trigger").status_code == 201
    page = server.send("GET", "/ui/schedules")
    assert 'href="/ui/flows/ask"' in page.text
