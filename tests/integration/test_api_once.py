"""A request that is repeated with the same Idempotency-Key takes effect once or is rejected; the key is never
ignored."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine

from orchestrator.api.routes import ROUTES, enqueueing
from tests.integration.api_client import ApiClient, bare_api, bare_settings, empty_engine  # noqa: F401

ID = "0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17"
"""An unused id."""


def post(api: ApiClient, path: str, body: Any, *headers: tuple[str, str]) -> Any:
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    return api.send("POST", path, headers=[*headers], **given)


def bulk(api: ApiClient, key: str, *calls: dict[str, Any]) -> Any:
    return post(api, "/api/v1/tasks/bulk", {"tasks": [*calls]}, ("Idempotency-Key", key))


def call(name: str, *args: Any, **options: Any) -> dict[str, Any]:
    return {"name": name, "args": [*args], **options}


def count(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM orchestrator.tasks").scalar_one())


def test_a_bulk_with_an_idempotency_key_is_enqueued_once(api: ApiClient, engine: Engine) -> None:
    calls = [call("t.a", 1), call("t.a", 1), call("t.b", 2)]
    first, again = bulk(api, "k", *calls), bulk(api, "k", *calls)
    assert (first.status_code, again.status_code) == (201, 201)
    assert len(set(first.json()["ids"])) == 3
    assert again.json() == first.json()
    assert bulk(api, "other", *calls).json()["ids"] != first.json()["ids"]
    assert count(engine) == 6


@pytest.mark.parametrize(
    "others",
    [
        [call("t.a", 1), call("t.b", 3)],
        [call("t.a", 1), call("t.c", 2)],
        [call("t.b", 2), call("t.a", 1)],
        [call("t.a", 1)],
        [call("t.a", 1), call("t.b", 2), call("t.c", 3)],
    ],
    ids=["arguments", "name", "order", "fewer", "more"],
)
def test_a_different_bulk_under_the_same_key_is_rejected(
    api: ApiClient, engine: Engine, others: list[dict[str, Any]]
) -> None:
    assert bulk(api, "k", call("t.a", 1), call("t.b", 2)).status_code == 201
    refused = bulk(api, "k", *others)
    assert refused.status_code == 409, refused.text
    assert "'k" in refused.json()["detail"]
    assert "once:" not in refused.text
    assert '"task_id":""' not in refused.text
    assert count(engine) == 2


def test_a_tasks_own_key_takes_precedence_over_the_bulk_key(api: ApiClient, engine: Engine) -> None:
    own = call("t.a", 1, idempotency_key="mine")
    alone = post(api, "/api/v1/tasks", own).json()["id"]
    answers = [bulk(api, "k", own, call("t.b", 2)).json()["ids"] for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0][0] == alone
    assert count(engine) == 2
    both = bulk(api, "k", call("t.b", 2), call("t.a", 1, unique_key="u"))
    assert both.status_code == 422
    assert "#/tasks/1" in both.json()["detail"]


def test_a_bulk_with_a_key_and_too_many_tasks_is_rejected(api: ApiClient, engine: Engine) -> None:
    most = enqueueing._MAX_KEYED_TASKS
    assert len(bulk(api, "k", *[call("t.a", 1)] * most).json()["ids"]) == most
    assert bulk(api, "l", *[call("t.a", 1)] * (most + 1)).status_code == 422
    assert count(engine) == most


def test_routes_without_key_support_reject_an_idempotency_key(api: ApiClient) -> None:
    places = {"id": ID, "number": "1"}
    routes = [one for one in ROUTES if one.method == "POST" and not one.takes_key]
    assert "/api/v1/events" in {one.path for one in routes}
    for endpoint in routes:
        path = endpoint.path.format_map({name: places.get(name, "a") for name in endpoint.path_params})
        answer = post(api, path, {}, ("Idempotency-Key", "k"))
        assert (answer.status_code, "Idempotency-Key" in answer.text) == (422, True), f"{path}: {answer.text}"


def test_repeated_idempotency_and_authorization_headers_are_rejected(api: ApiClient, engine: Engine) -> None:
    for name in ("Idempotency-Key", "Authorization"):
        answer = post(api, "/api/v1/tasks", call("t.a"), (name, "a"), (name, "b"))
        assert answer.status_code == 400
        assert name in answer.json()["detail"]
    assert count(engine) == 0


def test_a_key_conflict_quotes_the_key_as_given(api: ApiClient) -> None:
    key = ("Idempotency-Key", "i1")
    first = post(api, "/api/v1/tasks", call("shop.job", 1), key).json()["id"]
    again = post(api, "/api/v1/tasks", call("shop.job", 1, queue="default", delay=5), key)
    assert again.json()["id"] == first  # explicit defaults match, and the delay is not compared
    other = post(api, "/api/v1/tasks", call("shop.job", 2), key).json()
    assert (other["status"], other["task_id"]) == (409, first)
    assert "the key 'i1'" in other["detail"]


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("queue", "mail", "queue 'default', here 'mail'"),
        ("priority", 5, "priority 0, here 5"),
        ("retries", 3, "other retries"),
        ("timeout", 3, "another timeout"),
        ("concurrency_key", "a", "concurrency_key"),
        ("redact", ["a"], "another redact"),
        ("args", [2], "arguments"),
        ("name", "shop.other", "name 'shop.job', here 'shop.other'"),
    ],
)
def test_a_bulk_key_conflicts_if_any_option_differs(
    api: ApiClient, engine: Engine, option: str, value: Any, said: str
) -> None:
    first = bulk(api, "k", call("shop.job", 1)).json()["ids"][0]
    other = bulk(api, "k", call("shop.job", 1) | {option: value})
    assert (other.status_code, other.json()["task_id"]) == (409, first)
    assert f"Task {first} was enqueued under the key 'k/0'" in other.json()["detail"]
    assert said in other.json()["detail"].partition(";")[0]
    assert count(engine) == 1


def test_a_single_tasks_key_conflicts_if_its_options_differ(api: ApiClient, engine: Engine) -> None:
    key = ("Idempotency-Key", "i1")
    given = call("shop.job", 1, retries=2, priority=3, redact=["a"])
    first = post(api, "/api/v1/tasks", given, key).json()["id"]
    assert post(api, "/api/v1/tasks", given, key).json()["id"] == first
    other = post(api, "/api/v1/tasks", given | {"queue": "mail", "retries": 4}, key)
    assert (other.status_code, other.json()["task_id"]) == (409, first)
    assert "queue 'default', here 'mail'" in other.json()["detail"]
    assert "other retries" in other.json()["detail"]
    assert count(engine) == 1


def test_a_bulk_error_names_the_invalid_task(api: ApiClient, engine: Engine) -> None:
    answer = post(api, "/api/v1/tasks/bulk", {"tasks": [call("t.a"), call("t.a", priority=1000)]}).json()
    assert (answer["status"], answer["errors"][0]["pointer"]) == (422, "#/tasks/1")
    assert answer["detail"].startswith("#/tasks/1: ")
    assert count(engine) == 0


def test_a_flow_run_with_a_key_is_started_once(api: ApiClient, engine: Engine) -> None:
    definition = {"start": "ask", "nodes": {"ask": {"kind": "approval"}}}
    assert post(api, "/api/v1/flows/order", {"definition": definition}).status_code == 200
    key, given = ("Idempotency-Key", "k"), {"flow_id": "order", "params": {"val": 2}}
    first, again = post(api, "/tasks", given, key), post(api, "/tasks", given, key)
    assert (first.status_code, again.json()) == (200, first.json()), again.text
    assert post(api, "/tasks", given | {"request_id": "k"}).json() == first.json()  # the same key
    assert post(api, "/tasks", given | {"request_id": "k"}, key).json() == first.json()
    other = post(api, "/tasks", given | {"params": {"val": 3}}, key)
    assert (other.status_code, "with different parameters" in other.text) == (409, True), other.text
    both = post(api, "/tasks", given | {"request_id": "other"}, key)
    assert (both.status_code, "Idempotency-Key" in both.text) == (422, True), both.text
    assert post(api, "/tasks", given, ("Idempotency-Key", "another")).json() != first.json()
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM orchestrator.runs").scalar_one() == 2


def test_error_titles_say_why_a_request_is_rejected(api: ApiClient) -> None:
    deep = post(api, "/api/v1/tasks", b'{"name": "t.a", "args": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    assert (deep.status_code, deep.json()["title"]) == (422, "The request does not fit")
    name = post(api, "/api/v1/queues/no%20name/pause", {})
    assert (name.status_code, name.json()["title"]) == (422, "It cannot be accepted")
