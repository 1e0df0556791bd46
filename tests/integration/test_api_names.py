"""Every name works in a path: names with slashes, and names that equal a segment of a route."""

from __future__ import annotations

from collections import Counter
from typing import Any
from uuid import uuid4

import pytest

from tests.integration.api_client import ApiClient, bare_api, bare_settings, empty_engine  # noqa: F401


def apply(api: ApiClient, name: str) -> None:
    document = {"name": name, "tasks": {"a": {"task": "t.a"}}, "schedule": {"cron": "0 6 * * *"}}
    assert api.send("POST", "/api/v1/workflows", json={"definition": document}).status_code == 200


def test_a_name_may_have_slashes(api: ApiClient) -> None:
    apply(api, "a/b")
    assert api.send("GET", "/api/v1/workflows/a%2Fb").json()["name"] == "a/b"
    assert api.send("GET", "/workflows/a%2fb").json()["name"] == "a/b"
    assert api.send("GET", "/api/v1/workflows/a%2Fb/versions").status_code == 200
    assert api.send("POST", "/api/v1/workflows/a%2Fb/runs").status_code == 201
    assert api.send("POST", "/api/v1/queues/a%2Fb/pause?new=true").status_code == 200
    assert "a/b" in [queue["queue"] for queue in api.send("GET", "/api/v1/queues").json()["queues"]]
    assert api.send("POST", "/api/v1/queues/a%2Fb/resume").status_code == 200
    assert api.send("POST", "/api/v1/schedules/a%2Fb/default/pause").status_code == 200
    assert api.send("GET", "/api/v1/workflows/a/b").status_code == 404
    assert api.send("DELETE", "/api/v1/workflows/a%2Fb").status_code == 200


@pytest.mark.parametrize("name", ["validate", "diff"])
def test_a_workflow_may_have_the_name_of_a_route_segment(api: ApiClient, name: str) -> None:
    apply(api, name)
    assert api.send("GET", f"/api/v1/workflows/{name}").json()["name"] == name
    assert api.send("HEAD", f"/api/v1/workflows/{name}").status_code == 200
    assert api.send("POST", f"/api/v1/workflows/{name}/runs").status_code == 201
    checked = api.send("POST", "/api/v1/workflows/validate", json={"text": "name: x"})
    assert checked.json()["valid"] is False
    assert api.send("DELETE", f"/api/v1/workflows/{name}").json() == {"done": "deleted"}


def test_unknown_paths_and_methods_are_rejected(api: ApiClient) -> None:
    assert api.send("PUT", "/api/v1/workflows/validate").headers["Allow"] == "POST"
    assert api.send("GET", "/api/v1/workflows//versions").status_code == 404
    assert api.send("GET", "/api/v1/nowhere").status_code == 404
    assert api.send("GET", "/api/v1/tasks/retry").headers["Allow"] == "POST", "no task has this id"
    assert api.send("GET", f"/api/v1/tasks/{uuid4()}").status_code == 404


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
def test_a_trailing_slash_redirects_to_the_path_without_the_slash(api: ApiClient, asked: str, told: str | None) -> None:
    """The redirect is relative, so that a proxy's scheme and prefix are kept."""
    answer = api.send("GET", f"http://localhost{asked}")
    assert (answer.status_code, answer.headers.get("Location")) == (307 if told else 404, told)
    if told:
        assert answer.url.join(told).path == answer.url.path.rstrip("/")


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br, gzip", "identity, gzip"])
def test_an_encoded_body_is_rejected_unread(api: ApiClient, encoding: str) -> None:
    answer = api.send("POST", "/api/v1/tasks", headers={"Content-Encoding": encoding}, content=b"\x1f\x8b")
    assert (answer.status_code, answer.headers["Connection"]) == (415, "close")
    assert f"Content-Encoding: expected none, found {encoding!r}" in answer.json()["detail"]


@pytest.mark.parametrize("mark", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_named_in_the_error(api: ApiClient, mark: str) -> None:
    body = '{"name": "t.a"}'.encode(mark)
    answer = api.send("POST", "/api/v1/tasks", headers={"Content-Encoding": "identity"}, content=body)
    assert answer.status_code == 400
    assert "byte order mark" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("name", "schedule"), [("", None), ("fine", {}), ("fine", {"cron": "no"}), ("fine", {"at": 1})]
)
def test_publishing_a_flow_rejects_an_empty_name_or_invalid_schedule(api: ApiClient, name: str, schedule: Any) -> None:
    graph = {"start": "a", "nodes": {"a": {"kind": "approval"}}, "schedule": schedule}
    answer = api.send("POST", "/api/v1/client/flows/publish", json={"name": name, "graph": graph})
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
def test_publishing_a_flow_rejects_an_invalid_graph(api: ApiClient, graph: Any, said: str) -> None:
    given = {"start": "a", "nodes": {"a": {"kind": "approval"}}} | graph
    answer = api.send("POST", "/api/v1/client/flows/publish", json={"name": "unfit", "graph": given})
    assert (answer.status_code, said in answer.json()["detail"]) == (422, True), answer.text
    assert api.send("GET", "/api/v1/flows/unfit").status_code == 404


def test_each_operation_has_a_unique_id(api: ApiClient) -> None:
    paths = api.send("GET", "/openapi.json").json()["paths"]
    names = Counter(operation["operationId"] for methods in paths.values() for operation in methods.values())
    assert [name for name, times in names.items() if times > 1] == []
