"""Schedules that start flows, however they are set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator import InvalidWorkflow, NotFound, WorkflowContext
from orchestrator.sdk.dag import definitions
from orchestrator.sdk.flow.builder import FlowGraph
from tests.integration.stage import System

DAY = 86_400.0
"""Seconds in a day. Schedules here fire at midnight, so that none fires on its own during a test."""
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


def test_each_fire_starts_the_version_published_at_that_time(system: System) -> None:
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


def test_invalid_schedules_of_flows_are_rejected(system: System) -> None:
    @system.app.workflow(name="by-code")
    async def by_code(ctx: WorkflowContext) -> None: ...

    system.app.workflows.apply(definitions.from_data({"name": "steps", "tasks": {"only": {"task": "job"}}}))
    schedules = system.app.schedules
    with pytest.raises(NotFound, match=r"Flow 'ask' has no version 9; the newest is 1\."):
        schedules.set("ask", every="24h", version=9)
    with pytest.raises(NotFound, match=r"no workflow 'asc', and no published flow\. Did you mean 'ask'\?"):
        schedules.set("asc", every="24h")
    with pytest.raises(InvalidWorkflow, match="'steps' is a workflow, and its schedules start the newest version"):
        schedules.set("steps", every="24h", version=1)
    with pytest.raises(InvalidWorkflow, match="'by-code' is a workflow as code"):
        schedules.set("by-code", every="24h", version=1)
    with pytest.raises(InvalidWorkflow, match="nothing"):
        schedules.set("ask", every="24h", params={"due": "${run.nothing}"})
    assert system.count("schedules") == 0


# -- schedules in files


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
    assert system.app.flows.publish("daily", file) == 1  # the schedule is not part of the version
    assert system.app.schedules["daily"].status().schedule.every == 2 * DAY
    (row,) = system.sql("SELECT definition FROM orchestrator.flows WHERE name = 'daily'")
    assert "schedule" not in row["definition"]
    file.write_text(body)
    system.app.flows.publish("daily", file)
    assert "daily/default" not in system.app.schedules.names()


def test_a_flow_built_in_python_may_have_a_schedule(system: System) -> None:
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
def test_an_invalid_schedule_is_reported_with_its_line(
    system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("daily.yaml").write_text(f"start: ask\nnodes: {{ask: {{kind: approval}}}}\n{written}\n")
    with pytest.raises(InvalidWorkflow) as refused:
        system.app.flows.publish("daily", "daily.yaml")
    assert told in str(refused.value)


def test_a_nested_flow_cannot_have_a_schedule(system: System) -> None:
    inner = {**ASK, "schedule": {"every": "24h"}}
    with pytest.raises(InvalidWorkflow, match="A flow has no 'schedule'"):
        system.app.flows.publish("outer", {"start": "in", "nodes": {"in": {"kind": "subflow", "subflow": inner}}})
