"""Runs started from pages: again, with changes, from a schedule, and by two operators at the same time."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html import unescape
from typing import Any

import msgspec
import pytest

from orchestrator import WorkflowContext
from orchestrator.sdk.dag.definitions import loads
from orchestrator.sdk.tasks.parameters import announced_parameters
from orchestrator.sdk.values.payload import decode_call
from tests.integration.stage import System, Worker
from tests.integration.test_dashboard_seen import form, operator

DUE = "2026-01-02T03:00:00+00:00"


@pytest.fixture
def worker(system: System) -> Worker:
    @system.app.schedule(every="1h", params={"due": "${run.fire_time}", "area": "attic"})
    @system.app.task(name="clean")
    def clean(due: str, area: str) -> None: ...

    @system.app.task(name="ship")
    def ship(order: dict[str, int], at: datetime, note: str | None = None) -> None: ...

    system.app.schedules.apply()
    found = system.worker(knows=("clean", "ship"), slots=9)
    found.parameters = msgspec.msgpack.encode(announced_parameters([("ship", ship._signature, ())]))
    found.beat()
    system.pass_seconds()
    return found


def dispatched_arguments(system: System, worker: Worker) -> list[Any]:
    """Dispatch the ready tasks; return their named arguments."""
    system.pass_seconds()
    return [decode_call(one.payload)[1] for one in worker.take()]


def newest_run(system: System) -> dict[str, Any]:
    (row,) = system.sql("SELECT * FROM orchestrator.runs ORDER BY id DESC LIMIT 1")
    return dict(row)


def count(system: System) -> int:
    (row,) = system.sql("SELECT count(*) FROM orchestrator.runs")
    return int(row["count"])


def test_a_scheduled_run_with_changes_keeps_its_fire_time(system: System, worker: Worker) -> None:
    ada = operator(system)
    ada.post("/ui/schedules/clean/default/trigger")
    (called,) = dispatched_arguments(system, worker)
    run = newest_run(system)
    assert called == {"due": run["fire_time"].isoformat(), "area": "attic"} == run["params"]
    page = unescape(ada.get(f"/ui/runs/{run['id']}").text)
    assert called["due"] in page
    assert called["due"] in unescape(ada.get("/ui/runs").text)
    path = f"/ui/runs/{run['id']}/again"
    assert called["due"] in unescape(ada.get(path).text)
    ada.post(path, named=f'{{"due": "{called["due"]}", "area": "cellar"}}')
    assert dispatched_arguments(system, worker) == [called | {"area": "cellar"}]


def test_a_workflow_run_with_changes_keeps_its_fire_time(system: System, worker: Worker) -> None:
    step = "{task: clean, input: {due: '${run.fire_time}', area: '${params.n}'}}"
    system.app.workflows.apply(loads(f"name: nightly\nparams: {{n: {{default: 1}}}}\ntasks:\n  only: {step}\n"))
    run = system.app.workflows["nightly"].start()
    system.sql("UPDATE orchestrator.runs SET fire_time = :due WHERE id = :id", due=DUE, id=run.id)
    dispatched_arguments(system, worker)
    operator(system).post(f"/ui/runs/{run.id}/again", named='{"n": 2}')
    assert dispatched_arguments(system, worker) == [{"due": DUE, "area": 2}]


@pytest.mark.parametrize(
    ("page", "action"),
    [
        ("/ui/schedules", "/ui/schedules/clean/default/trigger"),
        ("/ui/schedules/clean/default", "/ui/schedules/clean/default/trigger"),
        ("/ui/workflows/clean", "/ui/workflows/clean/runs"),
        ("/ui/runs/{run}", "/ui/runs/{run}/rerun"),
        ("/ui/runs/{run}/again", "/ui/runs/{run}/again"),
    ],
)
def test_a_second_start_from_a_stale_page_asks_for_confirmation(
    system: System, worker: Worker, page: str, action: str
) -> None:
    run = system.app.workflows["clean"].start()
    dispatched_arguments(system, worker)
    run.cancel()
    system.pass_seconds(3)
    page, action = (text.replace("{run}", str(run.id)) for text in (page, action))
    ada, bob = operator(system), operator(system)
    seen = [form(one.get(page).text, action) for one in (ada, bob)]
    assert all("since" in one for one in seen)
    ada.post(action, **seen[0])
    assert "tarted" in ada.said()
    refused = bob.post(action, **seen[1])
    said = unescape(refused.text) if refused.status_code == 409 else bob.said()
    assert re.search(r"The same run was started by .+ at .+, after this page was loaded\. Start another one\?", said)
    assert count(system) == 2, "the first one, and that of one operator"
    bob.post(action, **form(bob.get(page).text, action))
    assert count(system) == 3, "who has looked again may"
    said = f'Started over from</dt><dd><a href="/ui/runs/{run.id}">'
    assert (said in bob.get(f"/ui/runs/{newest_run(system)['id']}").text) == (str(run.id) in page)
    assert said not in bob.get(f"/ui/runs/{run.id}").text


def test_a_page_that_differs_only_in_form_age_is_not_modified(system: System, worker: Worker) -> None:
    ada = operator(system)
    first = ada.get("/ui/workflows/clean", **{"If-None-Match": '"none"'})
    again = ada.get("/ui/workflows/clean", **{"If-None-Match": first.headers["ETag"]})
    assert again.status_code == 304


@pytest.mark.parametrize(
    ("order", "found"),
    [('"{not json"', "a text"), ("[1, 2]", "a list"), ('"str"', "a text"), ("null", "null"), ('{"n": 2}', "")],
)
def test_changed_arguments_are_checked_against_their_types(
    system: System, worker: Worker, order: str, found: str
) -> None:
    task = system.app.tasks["ship"].enqueue({"n": 1}, at=datetime(2026, 1, 2, tzinfo=UTC))
    path = f"/ui/tasks/{task.id}/again"
    ada = operator(system)
    page = ada.get(path).text
    assert "dict[str, int], required" in page
    (at,) = re.findall(r'data-param="at"[^>]*data-json="([^"]*)"', page)
    answer = ada.post(path, named=f'{{"order": {order}, "at": {unescape(at)}, "note": null}}')
    said = "order: expected an object" in unescape(answer.text)
    assert (answer.status_code, said) == ((422, True) if found else (303, False))


def test_the_signal_form_warns_of_the_risk(system: System, worker: Worker) -> None:
    @system.app.workflow(name="shop")
    async def shop(ctx: WorkflowContext) -> None: ...

    run = shop.start()
    page = operator(system).get(f"/ui/runs/{run.id}").text
    (fields,) = re.findall(r'data-name-in-path="/ui/runs/[^"]*/signals/%".*?</form>', page)
    assert '<input type="checkbox" required>' in fields
    assert "a wrong type fails the run" in fields
    operator(system).post(f"/ui/runs/{run.id}/terminate")
    system.pass_seconds(3)
    assert "Start over" in operator(system).get(f"/ui/runs/{run.id}").text
