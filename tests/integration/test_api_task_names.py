"""Which tasks a key may enqueue: registered tasks, and those it is limited to; and which flows the key may name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from orchestrator.domain.access import Scope, Secret
from orchestrator.domain.tasks.callbacks import Callback, Callbacks
from orchestrator.domain.tasks.task import NewTask
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.values.payload import encode_call
from tests.integration.api_house import House, definition

WEBHOOK = "orchestrator.webhook"


def build_task(name: str, followed_by: str | None = None, run: bytes | None = None) -> NewTask:
    followers = None if followed_by is None else Callbacks("a", failure=(Callback(followed_by, "default"),))
    callbacks = None if followers is None else msgspec.json.encode(followers).decode()
    position = None if run is None else 0
    payload = encode_call("a", [], {}, 1_000)
    return NewTask(new_id(), name, "default", payload, callbacks=callbacks, run_id=run, position=position)


def enqueued(house: House, key: Secret, name: str) -> set[int]:
    """Enqueue a task through every endpoint; return the statuses."""
    run = new_id()
    bodies: dict[str, Any] = {
        "": {"name": name},
        "/bulk": {"tasks": [{"name": "t.a"}, {"name": name}]},
        "enqueue": {"task": build_task(name)},
        "enqueue ": {"task": build_task("t.a", followed_by=name)},
        "enqueue_many": {"tasks": [build_task("t.a"), build_task(name)]},
        "start": {"run_id": run, "name": "many", "tasks": [build_task(name, run=run)]},
    }
    paths = {"start": "/api/v1/client/runs/start"}
    found = {}
    for way, body in bodies.items():
        client = f"/api/v1/client/tasks/{way.strip()}" if way[:1] == "e" else f"/api/v1/tasks{way}"
        answer = house.send("POST", paths.get(way, client), key, content=msgspec.json.encode(body))
        found[way] = answer.status_code
    return set(found.values())


@pytest.mark.parametrize("name", ["plain.py:helper", "os.path:join", WEBHOOK])
def test_an_enqueue_key_may_enqueue_only_registered_tasks(house: House, name: str) -> None:
    assert enqueued(house, house.make_key(None, None, Scope.ENQUEUE), name) == {403}
    assert enqueued(house, house.make_key(None, None, Scope.OPERATE), name) <= {200, 201}


def test_a_key_can_be_limited_to_task_names(house: House) -> None:
    key = house.make_key(None, None, Scope.ENQUEUE, tasks=f"t.,{WEBHOOK}")
    for name, status in (("t.b", 201), (WEBHOOK, 201), ("u.a", 403), ("orchestrator.start", 403), ("t.py:a", 403)):
        answer = house.send("POST", "/api/v1/tasks", key, json={"name": name})
        assert answer.status_code == status, answer.text
        call = {"task": build_task("t.a", followed_by=name)}
        answer = house.send("POST", "/api/v1/client/tasks/enqueue", key, content=msgspec.json.encode(call))
        assert answer.status_code == (200 if status == 201 else 403), answer.text
    author = house.make_key(None, None, Scope.OPERATE, tasks="t.")
    answer = house.send("POST", "/workflows", author, json=definition("any", "default"))
    assert (answer.status_code, "limited to some tasks" in answer.text) == (403, True)


def test_a_scoped_key_learns_nothing_about_flows_outside_its_scope(house: House) -> None:
    whole, graph = house.make_key(None, None), {"start": "secret-step", "nodes": {"secret-step": {"service": "s"}}}
    for name in ("mail-inner", "bank-inner"):
        assert house.send("POST", f"/api/v1/flows/{name}", whole, json={"definition": graph}).is_success
    for scope, path in ((Scope.READ, "validate"), (Scope.OPERATE, "mail-outer")):
        key, answers = house.make_key("", "mail-", scope), {}
        for inner in ("mail-inner", "bank-inner", "bank-none"):
            nodes = {"a": {"kind": "subflow", "subflow": {"flow": inner}}}
            edges = [{"from": "a", "to": "nowhere"}] if inner != "mail-inner" else []
            body = {"definition": {"start": "a", "nodes": nodes, "edges": edges}}
            answer = house.send("POST", f"/api/v1/flows/{path}", key, json=body)
            answers[inner] = answer.status_code, answer.text.replace(inner, "")
        assert answers["mail-inner"][0] == 200
        assert answers["bank-inner"] == answers["bank-none"]
        assert answers["bank-inner"][0] == 403
