"""API keys limited to some queues and workflows: on every route, all other objects are rejected or not found."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from orchestrator.api.endpoints import Endpoint, Routes
from orchestrator.api.key_scope import BACKFILL, NOTHING, QUEUE, RUN, TASK, WHOLE, WITHIN, WORKFLOW, Subject
from orchestrator.api.routes import ROUTES
from orchestrator.domain.access import KeyScope, Secret
from orchestrator.sdk.ids import new_id
from tests.emptying import empty
from tests.integration.api_house import OTHERS, OWN, House, changes, definition
from tests.integration.waiting_house import code_that_asks, flow_that_asks


def place(endpoint: Endpoint, house: House, name: str) -> str:
    """Return the endpoint's path for objects of `mail` or `bank`."""
    kinds: dict[Subject, dict[str, Any]] = {
        QUEUE: {"name": f"{name}.out"},
        WORKFLOW: {"name": "default" if "{workflow}" in endpoint.path else f"{name}-flow", "workflow": f"{name}-flow"},
        TASK: {"id": house.tasks[name]},
        RUN: {"id": house.runs[name], "name": "a"},
        BACKFILL: {"number": house.backfills[name]},
    }
    return re.sub(r"{(\w+)}", lambda found: str(kinds[endpoint.about].get(found[1], "x")), endpoint.path)


NAMED = [one for one in ROUTES if one.about in (QUEUE, WORKFLOW, TASK, RUN, BACKFILL)]
BODIES = {"set_schedule": {"schedule": {"cron": "1 1 * * *"}}, "backfill": {"start": "2026-01-01"}, "reset": {"to": 1}}


def titled(endpoint: Endpoint) -> str:
    return f"{endpoint.method} {endpoint.path}"


@pytest.mark.parametrize("endpoint", NAMED, ids=titled)
def test_objects_outside_the_key_scope_are_rejected(house: House, endpoint: Endpoint) -> None:
    before = changes(house)
    body: dict[str, Any] = {} if endpoint.body is None else {"json": BODIES.get(endpoint.call.__name__, {})}
    answer = house.send(endpoint.method, place(endpoint, house, "bank"), **body)
    by_name = endpoint.about in (QUEUE, WORKFLOW)
    assert answer.status_code == (403 if by_name else 404), answer.text
    assert changes(house) == before
    if not by_name:  # indistinguishable from a missing object
        path = re.sub(
            r"{(id|number)}", lambda found: str(UUID(bytes=new_id())) if found[1] == "id" else "999", endpoint.path
        )
        missing = house.send(endpoint.method, re.sub(r"{\w+}", "a", path), **body)
        assert missing.json() == answer.json()


@pytest.mark.parametrize("endpoint", [one for one in NAMED if one.method == "GET" and not one.is_live], ids=titled)
def test_objects_in_the_key_scope_are_shown(house: House, endpoint: Endpoint) -> None:
    answer = house.send("GET", place(endpoint, house, "mail"))
    of_flows = ("show_flow", "show_flow_run", "list_node_runs")
    if endpoint.call.__name__ in (
        "history",
        "preview_reset",
        "task_logs",
        *of_flows,
    ):  # not a run of code or a flow, and no such step yet
        assert answer.status_code in (200, 404)
    elif endpoint.call.__name__ == "task_result":  # the task has not ended
        assert answer.status_code == 409
    else:
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("endpoint", [one for one in ROUTES if one.about is WHOLE], ids=titled)
def test_system_wide_routes_need_an_unscoped_key(house: House, endpoint: Endpoint) -> None:
    body: dict[str, Any] = {} if endpoint.body is None else {"json": {"name": "a"}}
    path = re.sub(r"{\w+}", "1", endpoint.path)
    assert house.send(endpoint.method, path, **body).status_code == 403


# -- routes that filter by key scope themselves: each has a check here


def listed(house: House, path: str, key: Secret | None = None) -> list[dict[str, Any]]:
    """Return all items of a list, read one per page."""
    found: list[dict[str, Any]] = []
    cursor = ""
    while True:
        page = house.get(f"{path}{'&' if '?' in path else '?'}limit=1{cursor}", key)
        found += page["items"]
        if page["next"] is None:
            return found
        assert len(found) < 100, "the cursor goes round"
        cursor = f"&cursor={page['next']}"


def ids(found: list[dict[str, Any]]) -> set[str]:
    return {one["id"] for one in found}


def lists_tasks(house: House) -> None:
    own = {str(house.tasks["mail"]), str(house.failed["mail"])}
    assert ids(listed(house, "/api/v1/tasks")) == own
    assert listed(house, f"/api/v1/tasks?queue={OTHERS}") == []
    assert ids(listed(house, "/api/v1/tasks?name=t.a&status=failed")) == {str(house.failed["mail"])}
    assert listed(house, "/api/v1/tasks?queue=shared") == []
    assert ids(listed(house, f"/api/v1/tasks?run={house.runs['mail']}")) == {str(house.run_tasks["mail"])}
    assert listed(house, f"/api/v1/tasks?run={house.runs['bank']}") == []
    assert house.get(f"/api/v1/tasks/{house.run_tasks['mail']}")["task"]["queue"] == "shared"
    assert listed(house, "/api/v1/tasks", house.make_key(None, "mail-")) == []


def lists_runs(house: House, path: str = "/api/v1/runs") -> None:
    found = listed(house, path)
    assert str(house.runs["mail"]) in ids(found)
    assert {one["workflow"] for one in found} == {"mail-flow"}
    assert listed(house, f"{path}?workflow=bank-flow") == []
    assert listed(house, f"{path}?parent={house.runs['bank']}") == []
    assert listed(house, path, house.make_key("mail.", None)) == []


def lists_runs_of_the_seed(house: House) -> None:
    lists_runs(house, "/runs")


def lists_queues(house: House, path: str = "/api/v1/queues") -> None:
    assert [one["queue"] for one in house.get(path)["queues"]] == [OWN]
    assert house.get(path, house.make_key(None, "mail-"))["queues"] == []


def lists_wanted_queues(house: House) -> None:
    lists_queues(house, "/api/v1/queues/wanted")


def lists_workflows(house: House, path: str = "/api/v1/workflows") -> None:
    assert [one["name"] for one in house.get(path)["workflows"]] == ["mail-flow"]
    assert house.get(path, house.make_key("mail.", None))["workflows"] == []


def lists_workflows_of_the_seed(house: House) -> None:
    lists_workflows(house, "/workflows")


def lists_schedules(house: House) -> None:
    assert [one["workflow"] for one in house.get("/api/v1/schedules")["schedules"]] == ["mail-flow"]


def enqueues(house: House) -> None:
    task = {"name": "t.a"}
    assert house.send("POST", "/api/v1/tasks", json=task).status_code == 403  # into `default`
    assert house.send("POST", "/api/v1/tasks", json=task | {"queue": OTHERS}).status_code == 403
    made = house.send("POST", "/api/v1/tasks", json=task | {"queue": OWN})
    assert made.status_code == 201
    with house.engine.connect() as connection:
        connection.exec_driver_sql("DELETE FROM orchestrator.tasks WHERE id = %s", (made.json()["id"],))


def enqueues_with_a_unique_key_outside_the_scope(house: House) -> None:
    whole = house.make_key(None, None)
    theirs = {"name": "t.a", "queue": OTHERS, "unique_key": "k", "args": [1]}
    held = house.send("POST", "/api/v1/tasks", whole, json=theirs).json()["id"]
    for policy in ("return", "replace", "raise"):
        mine = theirs | {"queue": OWN, "on_duplicate": policy, "args": [2]}
        for path, body in (("/api/v1/tasks", mine), ("/api/v1/tasks/bulk", {"tasks": [mine]})):
            answer = house.send("POST", path, json=body)
            assert answer.status_code == 409
            assert held not in answer.text
    assert house.get(f"/api/v1/tasks/{held}", whole)["args"] == [1]


def enqueues_many(house: House) -> None:
    before = changes(house)
    both = {"tasks": [{"name": "t.a", "queue": OWN}, {"name": "t.a", "queue": OTHERS}]}
    assert house.send("POST", "/api/v1/tasks/bulk", json=both).status_code == 403
    assert changes(house) == before


def redrives(house: House) -> None:
    def wanted() -> list[Any]:
        with house.engine.connect() as connection:
            return list(connection.exec_driver_sql("DELETE FROM orchestrator.inbox RETURNING kind, body->>'queue'"))

    wanted()
    answer = house.send("POST", "/api/v1/tasks/retry", json={"name": "t.a"}).json()
    assert (answer["tasks"], [group["queue"] for group in answer["groups"]]) == (1, [OWN])
    assert wanted() == [("redrive", OWN)]
    answer = house.send("POST", "/api/v1/tasks/retry", json={"queue": OTHERS})
    assert answer.json()["tasks"] == 0
    assert "secret of bank" not in answer.text
    assert wanted() == []


def applies(
    house: House, path: str = "/api/v1/workflows", wrap: Callable[[Any], Any] = lambda one: {"definition": one}
) -> None:
    for given in (
        definition("bank-flow", OWN),
        definition("mail-flow", OTHERS),
        definition("mail-flow", OWN, tasks={"a": {"task": "t.a", "queue": OTHERS}}),
        definition("mail-flow", OWN, tasks={"a": {"workflow": "bank-flow"}}),
        definition("mail-flow", OWN, on=[{"workflow": "bank-flow"}]),
        definition("mail-flow", OWN, on=[{"event": "paid"}]),
        definition("mail-flow", "default", tasks={"a": {"task": "t.a", "queue": OWN}, "b": {"task": "t.a"}}),
        definition("mail-flow", "default", tasks={"a": {"task": "t.a", "queue": OWN}}, on_failure=[{"task": "t.a"}]),
    ):
        before = changes(house)
        assert house.send("POST", path, json=wrap(given)).status_code == 403, given
        assert changes(house) == before
    assert house.send("POST", path, json=wrap(definition("mail-flow", OWN))).json()["new"] is False
    for given in (
        {"name": "mail-steps", "tasks": {"a": {"task": "t.a", "queue": OWN}}},
        {"name": "mail-steps", "tasks": {"a": {"task": "t.a"}}, "defaults": {"queue": OWN}},
        {"name": "mail-steps", "tasks": {"a": {"workflow": "mail-flow"}}},
    ):
        answer = house.send("POST", path, json=wrap(given))
        assert answer.is_success, answer.text
    assert house.send("DELETE", "/api/v1/workflows/mail-steps").is_success


def applies_at_the_seed(house: House) -> None:
    applies(house, "/workflows", lambda one: one)


def compares(house: House) -> None:
    path = "/api/v1/workflows/diff"
    assert house.send("POST", path, json={"definition": definition("bank-flow", OWN)}).status_code == 403
    assert house.send("POST", path, json={"definition": definition("mail-flow", OWN)}).json()["version"] == 1


def searches(house: House) -> None:
    for text in ("t.a", "bank-flow", "secret of bank", str(house.tasks["bank"]), str(house.runs["bank"])):
        found = house.send("GET", f"/api/v1/search?text={text}")
        assert found.status_code == 200
        assert not re.search(r"bank|shared", found.text), text
    for own, kind in ((house.tasks["mail"], "tasks_by_id"), (house.runs["mail"], "runs_by_id")):
        assert len(house.get(f"/api/v1/search?text={own}")[kind]) == 1
    assert ids(house.get("/api/v1/search?text=secret%20of")["failures"]) == {str(house.failed["mail"])}


def shows_throughput(house: House) -> None:
    with house.engine.connect() as connection:
        for queue in (OWN, OTHERS):
            connection.exec_driver_sql(
                "INSERT INTO orchestrator.throughput"
                " VALUES (now() - interval '1 minute', %s, 1, 1, 0, 0, 0, 1, 0, 0, '{}', '{}')",
                (queue,),
            )
    for query in ("", f"?queue={OTHERS}"):
        found = house.get(f"/api/v1/throughput{query}")["buckets"]
        assert {row["queue"] for row in found} == (set() if query else {OWN})


def graph(queue: str = OWN) -> dict[str, Any]:
    return {"start": "a", "nodes": {"a": {"service": "s", "queue": queue}}}


def publishes_flows(house: House) -> None:
    whole = house.make_key(None, None)
    assert house.send("POST", "/flows", whole, json={"name": "bank-graph"}).is_success
    version = {"flow_id": "bank-graph", "definition": graph(OTHERS)}
    assert house.send("POST", "/flows/version", whole, json=version).json() == {"id": "bank-graph@1"}
    started = house.send("POST", "/tasks", whole, json={"flow_id": "bank-graph"}).json()["id"]
    inner = {"start": "a", "nodes": {"a": {"kind": "subflow", "subflow": "bank-graph"}}}
    refused = [
        ("POST", "/flows", {"name": "bank-graph"}),
        ("POST", "/flows/version", {"flow_id": "bank-graph", "definition": graph()}),
        ("POST", "/flows/version", {"flow_id": "mail-graph", "definition": graph(OTHERS)}),
        ("POST", "/flows/version", {"flow_id": "mail-graph", "definition": inner}),
        ("POST", "/api/v1/flows/validate", {"definition": inner}),
        ("POST", "/api/v1/flows/mail-graph", {"definition": graph(OTHERS)}),
        ("POST", "/tasks", {"flow_id": "bank-graph"}),
        ("GET", "/flows/version?flow_id=bank-graph", None),
        ("GET", "/flows/version/get?id=bank-graph@1", None),
        ("GET", f"/tasks/get?id={started}", None),
        ("GET", f"/tasks/runs?task_id={started}", None),
        ("POST", f"/tasks/cancel?id={started}", None),
        ("POST", "/tasks/signal", {"task_id": started, "key": "k", "value": 1}),
    ]
    before = changes(house)
    for method, path, body in refused:
        given: dict[str, Any] = {} if body is None else {"json": body}
        assert house.send(method, path, **given).status_code in (403, 404), path
    assert changes(house) == before
    assert house.send("POST", "/flows/version", json={"FlowID": "mail-graph", "Definition": graph()}).is_success
    assert house.send("POST", "/api/v1/flows/validate", json={"definition": graph()}).is_success
    own = house.send("POST", "/tasks", json={"FlowID": "mail-graph", "ParamsJSON": "{}"}).json()["id"]
    assert [one["id"] for one in house.get("/flows")] == ["mail-graph"]
    assert [one["name"] for one in house.get("/api/v1/flows")["flows"]] == ["mail-graph"]
    assert {one["flow_id"] for one in house.get("/tasks")} == {"mail-graph"}
    assert house.get(f"/tasks/get?id={own}")["status"] == "pending"
    assert house.get("/flows/version?flow_id=mail-graph")[0]["status"] == "published"
    assert house.get("/flows/version/get?id=mail-graph@1")["version"] == 1


def cancels(house: House) -> None:
    path = "/api/v1/tasks/cancel"
    for body in ({"status": ["pending"]}, {"queue": OTHERS}, {"run": str(house.runs["bank"])}):
        found = house.send("POST", path, json=body | {"dry_run": True}).json()
        assert {group["queue"] for group in found["groups"]} <= {OWN}, body
    before = changes(house)
    assert house.send("POST", path, json={"queue": OTHERS}).json()["asked"] is False
    assert changes(house) == before


def lists_approvals(house: House) -> None:
    for name in ("mail", "bank"):
        flow_that_asks(house, name)
        code_that_asks(house, name)
    found = listed(house, "/api/v1/approvals")
    assert {(one["kind"], one["workflow"]) for one in found} == {("approval", "mail-asks"), ("promise", "mail-code")}
    assert listed(house, "/api/v1/approvals", house.make_key("mail.", None)) == []
    with house.engine.connect() as connection:
        connection.exec_driver_sql("DELETE FROM orchestrator.runs WHERE right(workflow, 5) = '-asks' OR code")
        connection.exec_driver_sql("DELETE FROM orchestrator.flows WHERE right(name, 5) = '-asks'")
        empty(connection, "promises", "histories", "node_runs")


OF_FLOWS = (
    *("GET /flows", "POST /flows", "GET /flows/version", "POST /flows/version", "GET /flows/version/get"),
    *("GET /tasks", "POST /tasks", "GET /api/v1/flows", "POST /api/v1/flows/validate"),
)
WITHIN_TESTS: dict[str, list[Callable[[House], None]]] = {
    "GET /api/v1/tasks": [lists_tasks],
    "POST /api/v1/tasks": [enqueues, enqueues_with_a_unique_key_outside_the_scope],
    "POST /api/v1/tasks/bulk": [enqueues_many],
    "POST /api/v1/tasks/retry": [redrives],
    "POST /api/v1/tasks/cancel": [cancels],
    "GET /api/v1/queues": [lists_queues],
    "GET /api/v1/queues/wanted": [lists_wanted_queues],
    "GET /api/v1/workflows": [lists_workflows],
    "POST /api/v1/workflows": [applies],
    "POST /api/v1/workflows/diff": [compares],
    "GET /api/v1/runs": [lists_runs],
    "GET /api/v1/approvals": [lists_approvals],
    "GET /api/v1/schedules": [lists_schedules],
    "GET /api/v1/search": [searches],
    "GET /api/v1/throughput": [shows_throughput],
    "GET /workflows": [lists_workflows_of_the_seed],
    "POST /workflows": [applies_at_the_seed],
    "GET /runs": [lists_runs_of_the_seed],
    **{title: [publishes_flows] for title in OF_FLOWS},
}
ANYBODYS = {"GET /healthz", "GET /readyz", "POST /api/v1/workflows/validate"}


KEEPING = [one for one in ROUTES if one.about is WITHIN and not one.path.startswith("/api/v1/client/")]
"""Routes that filter by key scope themselves; the client's are tested in test_api_client_key_scope.py."""


@pytest.mark.parametrize("endpoint", KEEPING, ids=titled)
def test_self_filtering_routes_keep_to_the_key_scope(house: House, endpoint: Endpoint) -> None:
    assert titled(endpoint) in WITHIN_TESTS, "give this route a test here: what does it show beside the prefix?"
    for test in WITHIN_TESTS[titled(endpoint)]:
        test(house)


def test_only_listed_routes_are_independent_of_the_key_scope() -> None:
    assert {titled(one) for one in ROUTES if one.about is NOTHING} == ANYBODYS


def test_a_route_without_a_declared_subject_is_rejected() -> None:
    routes = Routes("test")
    with pytest.raises(TypeError, match="about"):
        routes.get("/x")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="WITHIN"):
        routes.get("/x", about=WITHIN)(lambda: None)
    with pytest.raises(TypeError, match="WITHIN"):
        routes.get("/x", about=NOTHING)(lambda key_scope: key_scope)


def test_a_turn_task_has_the_key_scope_of_its_run(house: House) -> None:
    run = code_that_asks(house, "bank")
    with house.engine.connect() as connection:
        turn = "INSERT INTO orchestrator.tasks (id, name, queue, payload, run_id) VALUES (%s, 'bank-code', %s, '', %s)"
        connection.exec_driver_sql(turn, (run.hex, OWN, run.hex))
    before = changes(house)
    for method, path in (("GET", ""), ("POST", "/cancel"), ("POST", "/retry")):
        assert house.send(method, f"/api/v1/tasks/{run}{path}").status_code == 404, path
    client = house.send("POST", "/api/v1/client/tasks/cancel", json={"task": b64encode(run.bytes).decode()})
    assert client.status_code == 404, client.text
    assert changes(house) == before
    assert house.send("GET", f"/api/v1/tasks/{run}", house.make_key("", "bank-")).status_code == 200


def test_a_scoped_key_gets_no_name_suggestions(house: House) -> None:
    answer = house.send("GET", "/api/v1/workflows/mail-flov")
    assert (answer.status_code, "flow" in answer.json()["detail"]) == (404, False)


def test_a_key_limited_to_queues_covers_no_workflow() -> None:
    assert KeyScope.of(None, None) == KeyScope("", "")
    assert KeyScope.of("mail.", None).has_queue("mail.out")
    assert not KeyScope.of("mail.", None).has_workflow("mail.out")
    assert not KeyScope.of("mail.", None).has_workflow(None)
    assert KeyScope.of("mail.", "").has_workflow(None)
    assert not KeyScope.of("mail.", "").has_queue("mai")
