"""Workflows as code over plain HTTP: starts, updates and reset previews."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from orchestrator import HandlerFailed, InvalidArguments, UpdateRefused, WorkflowContext
from orchestrator.domain.access import Scope
from orchestrator.errors import from_problem
from orchestrator.sdk.code.engine import Engine
from tests.integration.api_client import ApiClient, make_key
from tests.integration.code_stage import rest
from tests.integration.stage import System, Worker
from tests.waiting import eventually

Ask = Callable[..., httpx.Response]


@pytest.fixture
def ask(system: System) -> Ask:
    return ApiClient(system.settings).send


@pytest.fixture
def worker(system: System) -> Worker:
    @system.app.workflow(name="shop.order")
    async def order(ctx: WorkflowContext, item: str, count: int = 1) -> str:
        return f"{count} {item}"

    worker = system.worker(knows=("shop.order", "shop.order@1"), queue="shop")
    system.tick_until(lambda: system.sql("SELECT FROM orchestrator.workers WHERE 'shop.order@1' = ANY(names)"))
    return worker


def test_a_workflow_as_code_is_started_by_its_name(system: System, ask: Ask, worker: Worker, engine_: Engine) -> None:
    given = {"args": ["tea"], "params": {"count": 2}, "key": "o-1", "tags": ["new"], "timeout": 60}
    paths = ("/api/v1/workflows/shop.order/runs", "/workflows/shop.order/runs")
    answers = [ask("POST", path, json=given) for path in paths]
    assert [answer.status_code for answer in answers] == [201, 201], answers[0].text
    run = answers[0].json()["id"]
    assert answers[1].json() == {"id": run}  # same key, same run
    rest(system, worker, engine_)
    shown = ask("GET", f"/api/v1/runs/{run}").json()
    assert (shown["run"]["status"], shown["code"]["result"]) == ("success", "2 tea")
    assert (shown["run"]["tags"], shown["run"]["key"], shown["run"]["version"]) == (["new"], "o-1", 1)
    assert system.sql("SELECT queue FROM orchestrator.ended_tasks")[0]["queue"] == "shop"


def test_a_known_workflow_without_live_workers_starts_in_its_last_queue(
    system: System, ask: Ask, worker: Worker, engine_: Engine
) -> None:
    ask("POST", "/api/v1/workflows/shop.order/runs", json={"kwargs": {"item": "tea"}})
    rest(system, worker, engine_)
    system.sql("DELETE FROM orchestrator.workers RETURNING id")
    run = ask("POST", "/api/v1/workflows/shop.order/runs", json={"args": ["milk"]}).json()["id"]
    assert system.row(run)["queue"] == "shop"
    assert ask("GET", f"/api/v1/runs/{run}").json()["code"]["args"] == ["milk"]


def test_a_definition_lookup_says_that_a_workflow_is_code(ask: Ask, worker: Worker) -> None:
    missing = ask("GET", "/api/v1/workflows/shop.order")
    assert missing.status_code == 404
    assert "'shop.order' is code" in missing.json()["detail"]
    assert "live workers that have it: 1; open runs: 0; versions: 1" in missing.json()["detail"]
    misspelt = ask("POST", "/api/v1/workflows/shop.ordr/runs")
    assert (misspelt.status_code, "Did you mean 'shop.order'?" in misspelt.json()["detail"]) == (404, True)


def test_invalid_start_arguments_are_rejected(ask: Ask, worker: Worker) -> None:
    twice = ask("POST", "/api/v1/workflows/shop.order/runs", json={"params": {"item": 1}, "kwargs": {"item": 2}})
    assert (twice.status_code, "'item'" in twice.json()["detail"]) == (422, True)
    definition = {"name": "steps", "tasks": {"a": {"task": "t.a"}}}
    ask("POST", "/api/v1/workflows", json={"definition": definition}).raise_for_status()
    assert ask("POST", "/api/v1/workflows/steps/runs", json={"args": [1]}).status_code == 422


def test_the_key_scope_must_include_the_queue_of_the_code(system: System, ask: Ask, worker: Worker) -> None:
    def start(queues: str) -> int:
        key = make_key(system.engine, Scope.ENQUEUE, queues=queues, workflows="shop.")
        status: int = ask("POST", "/api/v1/workflows/shop.order/runs", json={"args": ["tea"]}, key=key).status_code
        return status

    try:
        assert (start("mail"), start("shop")) == (403, 201)
    finally:
        system.sql("DELETE FROM orchestrator.api_keys")


def test_a_reset_preview_shows_its_effects_and_changes_nothing(system: System, ask: Ask, engine_: Engine) -> None:
    @system.app.workflow(name="shop.twice")
    async def twice(ctx: WorkflowContext) -> None:
        await ctx.promise("first")
        await ctx.promise("second")

    worker = system.worker(knows=("shop.twice", "shop.twice@1"))
    run = twice.start()
    rest(system, worker, engine_)
    answer = ask("GET", f"/api/v1/runs/{run.id}/reset?to=3")
    assert answer.json() == {"lines": [{"number": 1, "what": "promise first", "fate": "stays open"}]}, answer.text
    before = run.history().to_json()
    page = ask("GET", f"/ui/runs/{run.id}/reset?to=3").text
    for text in ("promise first", "stays open", "Reset to event 3", "It created the promise “first”."):
        assert text in page, text
    assert "Choose the last event to keep" in ask("GET", f"/ui/runs/{run.id}/reset").text
    for path in ("/api/v1", "/ui"):
        wrong = ask("GET", f"{path}/runs/{run.id}/reset?to=99")
        assert (wrong.status_code, "99" in wrong.text) == (409, True), wrong.text
    assert run.history().to_json() == before
    steps = {"name": "steps", "tasks": {"a": {"task": "t.a"}}}
    ask("POST", "/api/v1/workflows", json={"definition": steps}).raise_for_status()
    other = ask("POST", "/api/v1/workflows/steps/runs", json={}).json()["id"]
    assert ask("GET", f"/api/v1/runs/{other}/reset?to=1").status_code in (404, 409)


def test_failed_updates_have_distinct_error_types(system: System, ask: Ask, engine_: Engine) -> None:
    @system.app.workflow(name="shop.basket")
    async def basket(ctx: WorkflowContext) -> None:
        def check(count: int) -> None:
            if count > 9:
                raise ValueError("too many")

        @ctx.update(validate=check)
        def add(count: int) -> float:
            return 1 / count

        await ctx.signals("end").get()

    worker = system.worker(knows=("shop.basket",))
    handle = basket.start()
    rest(system, worker, engine_)
    calls: list[tuple[str, list[Any]]] = [("add", [10]), ("add", ["x"]), ("add", [0]), ("add", [2])]
    with ThreadPoolExecutor(8) as pool:
        path = f"/api/v1/runs/{handle.id}/updates"
        over_http = pool.submit(lambda: [ask("POST", f"{path}/{name}", json={"args": args}) for name, args in calls])
        direct = [pool.submit(handle.update, name, *args, timeout=60) for name, args in calls]
        done = [over_http.done, *(one.done for one in direct)]
        eventually(lambda: rest(system, worker, engine_) or all(one() for one in done), "all are answered")
    kinds = [UpdateRefused, InvalidArguments, HandlerFailed]
    answers = over_http.result()
    assert [answer.status_code for answer in answers] == [400, 400, 400, 200]
    told = [from_problem(one.json()["type"], one.json()["detail"], {}) for one in answers[:3]]
    assert [type(error) for error in told] == kinds
    assert [type(one.exception()) for one in direct[:3]] == kinds
    assert direct[3].result() == 0.5
