"""Whatever has a name can be asked for by it: with slashes in it, or called like a word of a route."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
from sqlalchemy import Engine

from orchestrator.api.app import create_app
from orchestrator.settings import load_settings
from orchestrator.store.database import engine_for
from tests.emptying import empty


class Server:
    """A server in this process."""

    def __init__(self, database_url: str, redis_url: str) -> None:
        self._app = create_app(load_settings(environ={}, database_url=database_url, redis_url=redis_url))

    def ask(self, method: str, path: str, **given: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.request(method, path, **given)

        return asyncio.run(ask())


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = engine_for(database_url, autocommit=True)
    with engine.connect() as connection:
        empty(connection)
    yield engine
    engine.dispose()


@pytest.fixture
def server(engine: Engine, database_url: str, redis_url: str) -> Server:
    return Server(database_url, redis_url)


def apply(server: Server, name: str) -> None:
    document = {"name": name, "tasks": {"a": {"task": "t.a"}}, "schedule": {"cron": "0 6 * * *"}}
    assert server.ask("POST", "/api/v1/workflows", json={"definition": document}).status_code == 200


def test_a_name_may_have_slashes(server: Server) -> None:
    apply(server, "a/b")
    assert server.ask("GET", "/api/v1/workflows/a%2Fb").json()["name"] == "a/b"
    assert server.ask("GET", "/workflows/a%2fb").json()["name"] == "a/b"
    assert server.ask("GET", "/api/v1/workflows/a%2Fb/versions").status_code == 200
    assert server.ask("POST", "/api/v1/workflows/a%2Fb/runs").status_code == 201
    assert server.ask("POST", "/api/v1/queues/a%2Fb/pause?new=true").status_code == 200
    assert "a/b" in [queue["queue"] for queue in server.ask("GET", "/api/v1/queues").json()["queues"]]
    assert server.ask("POST", "/api/v1/queues/a%2Fb/resume").status_code == 200
    assert server.ask("POST", "/api/v1/schedules/a%2Fb/default/pause").status_code == 200
    assert server.ask("GET", "/api/v1/workflows/a/b").status_code == 404
    assert server.ask("DELETE", "/api/v1/workflows/a%2Fb").status_code == 200


@pytest.mark.parametrize("name", ["validate", "diff"])
def test_a_workflow_may_be_called_like_a_word_of_a_route(server: Server, name: str) -> None:
    apply(server, name)
    assert server.ask("GET", f"/api/v1/workflows/{name}").json()["name"] == name
    assert server.ask("HEAD", f"/api/v1/workflows/{name}").status_code == 200
    assert server.ask("POST", f"/api/v1/workflows/{name}/runs").status_code == 201
    checked = server.ask("POST", "/api/v1/workflows/validate", json={"text": "name: x"})
    assert checked.json()["valid"] is False
    assert server.ask("DELETE", f"/api/v1/workflows/{name}").json() == {"done": "deleted"}


def test_what_nobody_serves_is_told(server: Server) -> None:
    assert server.ask("PUT", "/api/v1/workflows/validate").headers["Allow"] == "POST"
    assert server.ask("GET", "/api/v1/workflows//versions").status_code == 404
    assert server.ask("GET", "/api/v1/nowhere").status_code == 404
    assert server.ask("GET", "/api/v1/tasks/retry").headers["Allow"] == "POST", "no task has this id"
    assert server.ask("GET", f"/api/v1/tasks/{uuid4()}").status_code == 404


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("/api/v1/queues/", "../queues"),
        ("/api/v1/queues//", None),
        ("/api/v1/tasks/?limit=1&name=a%2Fb", "../tasks?limit=1&name=a%2Fb"),
        ("/api/v1/workflows/a%2Fb/", "../a%2Fb"),
        ("/docs/", "../docs"),
        ("/openapi.json/", "../openapi.json"),
        ("/ui/", "../ui"),
        ("/api/v1/nowhere/", None),
        ("//", None),
    ],
)
def test_a_slash_at_the_end_leads_to_the_path_without_it(server: Server, asked: str, told: str | None) -> None:
    """Seen from the path itself, so that neither the scheme nor the prefix of a proxy is lost."""
    answer = server.ask("GET", f"http://localhost{asked}")
    assert (answer.status_code, answer.headers.get("Location")) == (307 if told else 404, told)
    if told:
        assert answer.url.join(told).path == answer.url.path.rstrip("/")


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br, gzip", "identity, gzip"])
def test_an_encoded_body_is_refused_unread(server: Server, encoding: str) -> None:
    answer = server.ask("POST", "/api/v1/tasks", headers={"Content-Encoding": encoding}, content=b"\x1f\x8b")
    assert (answer.status_code, answer.headers["Connection"]) == (415, "close")
    assert f"Content-Encoding: expected none, found {encoding!r}" in answer.json()["detail"]


@pytest.mark.parametrize("mark", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_called_so(server: Server, mark: str) -> None:
    body = '{"name": "t.a"}'.encode(mark)
    answer = server.ask("POST", "/api/v1/tasks", headers={"Content-Encoding": "identity"}, content=body)
    assert answer.status_code == 400
    assert "byte order mark" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("name", "schedule"), [("", None), ("fine", {}), ("fine", {"cron": "no"}), ("fine", {"at": 1})]
)
def test_a_program_publishes_no_flow_without_a_name_or_a_fire(server: Server, name: str, schedule: Any) -> None:
    graph = {"start": "a", "nodes": {"a": {"kind": "approval"}}, "schedule": schedule}
    answer = server.ask("POST", "/api/v1/client/flows/publish", json={"name": name, "graph": graph})
    assert (answer.status_code, "found" in answer.json()["detail"]) == (422, True), answer.text


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        ({"start": ""}, "start names a node"),
        ({"start": "b"}, "start names a node"),
        ({"nodes": {}}, "a flow has nodes"),
        ({"nodes": {"a": {"kind": "timer"}}}, "params.delay_ms"),
        ({"edges": [{"from": "a", "to": "b"}]}, "there is no such node"),
        ({"nodes": {"a": {"kind": "subflow", "subflow": {"start": "", "nodes": {}}}}}, "a flow has nodes"),
    ],
)
def test_a_program_publishes_no_flow_that_a_file_could_not_have(server: Server, graph: Any, said: str) -> None:
    given = {"start": "a", "nodes": {"a": {"kind": "approval"}}} | graph
    answer = server.ask("POST", "/api/v1/client/flows/publish", json={"name": "unfit", "graph": given})
    assert (answer.status_code, said in answer.json()["detail"]) == (422, True), answer.text
    assert server.ask("GET", "/api/v1/flows/unfit").status_code == 404


def test_each_operation_has_a_name_of_its_own(server: Server) -> None:
    paths = server.ask("GET", "/openapi.json").json()["paths"]
    names = Counter(operation["operationId"] for methods in paths.values() for operation in methods.values())
    assert [name for name, times in names.items() if times > 1] == []
