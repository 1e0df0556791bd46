"""A definition that is applied over HTTP, compared, and replaced only as somebody has read it (RFC 9110, 13)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine
from starlette.applications import Starlette

from orchestrator.api.app import create_app
from orchestrator.settings import load_settings
from orchestrator.store.database import engine_for
from tests.emptying import empty

PATH = "/api/v1/workflows"
BODY: dict[str, Any] = {
    "name": "tagged",
    "params": {"zeta": {"type": "integer", "default": 1}, "alpha": {"type": "string", "default": "a"}},
    "tasks": {"second": {"task": "t.b", "input": {"z": 1, "a": 2}}, "first": {"task": "t.a"}},
}


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = engine_for(database_url, autocommit=True)
    with engine.connect() as connection:
        empty(connection)
    yield engine
    engine.dispose()


@pytest.fixture
def app(engine: Engine, database_url: str, redis_url: str) -> Starlette:
    del engine
    return create_app(load_settings(environ={}, database_url=database_url, redis_url=redis_url))


def ask(app: Starlette, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.request(method, path, json=body, headers=given)

    return asyncio.run(ask())


def apply(app: Starlette, description: str = "", **headers: str) -> httpx.Response:
    return ask(app, "POST", PATH, {"definition": BODY | {"description": description}}, **headers)


def test_an_unchanged_definition_is_no_difference(app: Starlette) -> None:
    before = ask(app, "POST", f"{PATH}/diff", {"definition": BODY}).json()
    assert (before["changed"], before["version"], before["stored"]) == (True, None, "")
    apply(app).raise_for_status()
    same = ask(app, "POST", f"{PATH}/diff", {"definition": BODY | {"description": ""}}).json()
    assert (same["changed"], same["version"]) == (False, 1)
    assert same["stored"] == same["given"]
    other = ask(app, "POST", f"{PATH}/diff", {"definition": BODY | {"description": "more"}}).json()
    assert other["changed"]
    assert "more" in other["given"]
    assert "more" not in other["stored"]


def test_what_is_applied_is_answered_with_the_tag_under_which_it_is_read(app: Starlette) -> None:
    first = apply(app)
    assert first.headers["ETag"] == ask(app, "GET", f"{PATH}/tagged").headers["ETag"]
    assert apply(app).headers["ETag"] == first.headers["ETag"]  # the same again
    assert apply(app, "other").headers["ETag"] == ask(app, "GET", f"{PATH}/tagged").headers["ETag"]


def test_the_seeds_own_routes_know_conditions_too(app: Starlette) -> None:
    tag = ask(app, "POST", "/workflows", BODY, If_None_Match="*").headers["ETag"]
    assert ask(app, "GET", "/workflows/tagged", If_None_Match=tag).status_code == 304
    assert ask(app, "POST", "/workflows", BODY, If_None_Match="*").status_code == 412


def test_what_is_to_be_new_replaces_nothing(app: Starlette) -> None:
    assert apply(app, If_None_Match="*").json()["version"] == 1
    refused = apply(app, "other", If_None_Match="*")
    assert refused.status_code == 412
    assert refused.json()["detail"].startswith("Workflow 'tagged' was to be new, and there is version 1")
    ask(app, "DELETE", f"{PATH}/tagged").raise_for_status()
    assert apply(app, "other", If_None_Match="*").json()["version"] == 2  # what was deleted is not there


def test_what_is_to_be_there_may_be_any_or_one_of_several(app: Starlette) -> None:
    missing = apply(app, If_Match="*")
    assert (missing.status_code, ask(app, "GET", f"{PATH}/tagged").status_code) == (412, 404)
    tag = apply(app).headers["ETag"]
    assert apply(app, "two", If_Match="*").json()["version"] == 2
    assert apply(app, "three", If_Match=tag).status_code == 412
    newest = ask(app, "GET", f"{PATH}/tagged").headers["ETag"]
    weak = apply(app, "three", If_Match=f"W/{newest}")
    assert weak.status_code == 412  # compared strongly, so no weak tag is the same
    assert apply(app, "three", If_Match=f'"0", {newest}').json()["version"] == 3
    assert apply(app, "four", If_None_Match=f'"0", {tag}').json()["version"] == 4
    newest = ask(app, "GET", f"{PATH}/tagged").headers["ETag"]
    assert apply(app, "five", If_None_Match=f"W/{newest}").status_code == 412  # compared weakly


@pytest.mark.parametrize("header", ["If_Match", "If_None_Match"])
@pytest.mark.parametrize("value", ["7", '"a" "b"', '"a', "", "*, *"])
def test_a_condition_that_cannot_be_read_changes_nothing(app: Starlette, header: str, value: str) -> None:
    answer = apply(app, **{header: value})
    assert answer.status_code == 400
    assert header.replace("_", "-") in answer.json()["detail"]
    assert ask(app, "GET", f"{PATH}/tagged").status_code == 404
