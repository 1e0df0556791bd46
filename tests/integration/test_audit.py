"""The audit log: every action writes an entry, and neither is stored without the other."""

from __future__ import annotations

import getpass
import json
import re
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
from click.testing import CliRunner, Result
from sqlalchemy import exc

from orchestrator.api import serving, slots
from orchestrator.api.endpoints import Endpoint
from orchestrator.api.key_scope import BACKFILL, QUEUE, RUN, TASK, WORKFLOW, Subject
from orchestrator.api.routes import ROUTES
from orchestrator.cli import main
from orchestrator.domain.access import Secret
from orchestrator.domain.code import history
from orchestrator.domain.quotas import Quotas
from orchestrator.sdk.backend import Backend
from orchestrator.sdk.flow.reading import from_data
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.values.payload import encode_call
from orchestrator.store import audit
from orchestrator.store.audit import AuditEntry, AuditFilter
from tests.emptying import empty
from tests.integration.api_house import House, changes, definition, furnished

UNAUDITED = {
    "POST /api/v1/tasks",
    "POST /api/v1/tasks/bulk",
    "POST /api/v1/events",
    "POST /api/v1/workflows/validate",
    "POST /api/v1/workflows/diff",
    "POST /api/v1/workflows/{name}/runs",
    "POST /workflows/{name}/runs",
    "POST /api/v1/runs/{id}/queries/{name}",
    "POST /workers/heartbeat",
    "POST /queue/poll",
    "POST /queue/heartbeat",
    "POST /queue/return",
    "POST /queue/complete",
    "POST /api/v1/flows/validate",
    "POST /api/v1/flows/{name}/runs",
    "POST /tasks",
}
"""Routes that only read, or start something: these are too many, and tasks and runs store their creation time."""
BODIES: dict[str, dict[str, Any]] = {
    "set_schedule": {"schedule": {"cron": "1 1 * * *"}},
    "backfill": {"start": "2026-01-01", "end": "2026-01-03"},
    "reset": {"to": 1},
    "retry_failed": {"queue": "mail.out"},
    "cancel_tasks": {"queue": "mail.out"},
    "update_run": {"timeout": 0},
    "register_worker": {"id": "w", "url": "http://10.0.0.7:8080", "services": ["sum"]},
}
GRAPH = {"start": "ask", "nodes": {"ask": {"kind": "approval", "params": {"approval_key": "ok"}}}}
"""A flow's definition."""
CLIENTS = ("/api/v1/client/", "/api/v1/waits")
"""Python client routes, answered by the same functions."""
ACTS = [
    one
    for one in ROUTES
    if one.method != "GET" and f"{one.method} {one.path}" not in UNAUDITED and not one.path.startswith(CLIENTS)
]


@pytest.fixture
def house(database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(slots, "_MAX_WAIT", 0.2)
    with furnished(database_url, redis_url) as found:
        yield found
        with found.engine.connect() as connection:
            empty(connection)


def lines(house: House, **wanted: Any) -> list[AuditEntry]:
    with house.engine.connect() as connection:
        return audit.list_page(connection, AuditFilter(**wanted), limit=1_000)


def clear_audit(house: House) -> None:
    with house.engine.connect() as connection:
        connection.exec_driver_sql("DELETE FROM orchestrator.audit")


def code_run(house: House) -> UUID:
    """Start a run of a workflow as code."""
    backend, run = Backend(house.settings), new_id()
    payload = encode_call("mail-code", [], {}, 10_000)
    started = history.RunStarted(workflow="mail-code", version=1, payload=payload, queue="mail.out")
    backend.code.start(run, started, timeout=None, tags="[]", key=None, on_conflict="reject", signal=None, pinned=False)
    backend.close()
    return UUID(bytes=run)


def flow_run(house: House) -> UUID:
    """Start a run of a flow."""
    backend, run = Backend(house.settings), new_id()
    backend.flows.publish("mail-graph", from_data(GRAPH))
    backend.flows.start("mail-graph", {}, run)
    backend.close()
    return UUID(bytes=run)


def make_ready(house: House, endpoint: Endpoint) -> None:
    """Bring objects into states that the endpoint can act on."""
    statements = {
        "retry_run": "UPDATE orchestrator.runs SET status = 'failed', ended_at = now()",
        "delete_run": "UPDATE orchestrator.runs SET status = 'failed', ended_at = now()",
        "drain_worker": "INSERT INTO orchestrator.workers (id, host, pid, queues, names, slots, running, state,"
        " started_at, seen_at, parent) VALUES ('x', 'x', 7, '{}', '{}', 1, 0, 'live', now(), now(), gen_random_uuid())"
        " ON CONFLICT DO NOTHING",
        "resume_schedule": "UPDATE orchestrator.schedules SET paused = true, next_fire = NULL, due_at = NULL",
        "pause_queue": "DELETE FROM orchestrator.queues",
        "resume_queue": "INSERT INTO orchestrator.queues (name, paused) VALUES ('mail.out', true)"
        " ON CONFLICT (name) DO UPDATE SET paused = true",
    }
    with house.engine.connect() as connection:
        if endpoint.call.__name__ in statements:
            connection.exec_driver_sql(statements[endpoint.call.__name__])


def address(endpoint: Endpoint, house: House) -> str:
    is_code = endpoint.tag == "workflows as code"
    task = house.failed if endpoint.call.__name__ == "retry_task" else house.tasks
    kinds: dict[Subject, dict[str, Any]] = {
        QUEUE: {"name": "mail.out"},
        WORKFLOW: {"name": "default" if "{workflow}" in endpoint.path else "mail-flow", "workflow": "mail-flow"},
        TASK: {"id": task["mail"]},
        RUN: {"id": code_run(house) if is_code else house.runs["mail"], "name": "a"},
        BACKFILL: {"number": house.backfills["mail"]},
    }
    if endpoint.tag == "flows":
        kinds |= {RUN: {"id": flow_run(house), "name": "ok"}, WORKFLOW: {"name": "mail-steps"}}
    places = kinds.get(endpoint.about, {})
    found = re.sub(r"{(\w+)}", lambda found: str(places.get(found[1], "x")), endpoint.path)
    return f"{found}?id={flow_run(house)}" if found == "/tasks/cancel" else found


def body(endpoint: Endpoint, house: House) -> dict[str, Any]:
    name = endpoint.call.__name__
    made = definition("mail-new", "mail.out")
    bodies = BODIES | {
        "apply_workflow": {"definition": made},
        "put_workflow": made,
        "publish_flow": {"definition": GRAPH},
        "create_flow": {"name": "mail-steps"},
        "create_version": {"flow_id": "mail-steps", "definition": GRAPH},
        "approve_flow": {"node": "ask"},
        "reject_flow": {"node": "ask"},
        "signal_flow": {"value": 1},
    }
    if name == "signal_task":
        return {"json": {"task_id": str(flow_run(house)), "key": "ok", "value": 1}}
    return {} if endpoint.body is None else {"json": bodies.get(name, {})}


@pytest.mark.parametrize("endpoint", ACTS, ids=lambda one: f"{one.method} {one.path}")
def test_every_http_action_writes_one_audit_entry(house: House, endpoint: Endpoint) -> None:
    key = house.make_key(None, None)
    make_ready(house, endpoint)
    path, sent = address(endpoint, house), body(endpoint, house)
    clear_audit(house)
    answer = house.send(endpoint.method, path, key, **sent)
    assert answer.status_code in (200, 201, 202, 409), answer.text
    [line] = lines(house)
    assert (line.who, line.origin) == (f"bound ({key.id})", "127.0.0.1")
    kinds = (
        "task",
        "run",
        "queue",
        "schedule",
        "workflow",
        "backfill",
        "failed tasks",
        "open tasks",
        "quarantine",
        "service",
        "flow",
        "worker",
    )
    assert line.kind in kinds


@pytest.mark.parametrize("endpoint", ACTS, ids=lambda one: f"{one.method} {one.path}")
def test_no_action_is_stored_without_its_audit_entry(house: House, endpoint: Endpoint) -> None:
    if endpoint.tag == "quarantine":
        pytest.skip("it stands in Redis, and is cleared after the line was written")
    key = house.make_key(None, None)
    make_ready(house, endpoint)
    path, sent = address(endpoint, house), body(endpoint, house)
    clear_audit(house)
    before = changes(house)
    with house.engine.connect() as connection:
        connection.exec_driver_sql("ALTER TABLE orchestrator.audit ADD CONSTRAINT refuse CHECK (false) NOT VALID")
    try:
        answer = house.send(endpoint.method, path, key, **sent)
    finally:
        with house.engine.connect() as connection:
            connection.exec_driver_sql("ALTER TABLE orchestrator.audit DROP CONSTRAINT refuse")
    assert answer.status_code == 500
    assert changes(house) == before


def test_rejected_requests_are_audited_at_a_limited_rate(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_REFILL_SECONDS", 3_600.0)
    clear_audit(house)
    assert house.send("POST", "/api/v1/queues/bank.out/purge").status_code == 403
    assert house.send("GET", "/api/v1/tasks", Secret("0" * 12, "x" * 43)).status_code == 401
    wrong, bound = lines(house, act="refused")
    assert (bound.target, bound.detail, bound.origin) == (
        "POST /api/v1/queues/bank.out/purge",
        {"status": 403},
        "127.0.0.1",
    )
    assert bound.who == f"bound ({house.key.id})"
    assert wrong.who == "? (000000000000)"
    for _ in range(30):
        assert house.send("GET", "/api/v1/status").status_code == 403
    assert len(lines(house, act="refused")) == serving._BURST


def command(house: House, *words: str) -> Result:
    environment = {
        "ORCHESTRATOR_DATABASE_URL": house.settings.database_url,
        "ORCHESTRATOR_REDIS_URL": house.settings.redis_url,
    }
    result = CliRunner().invoke(main, list(words), env=environment)
    assert result.exit_code == 0, result.output
    return result


def test_commands_on_the_database_write_audit_entries(house: House) -> None:
    clear_audit(house)
    command(house, "queues", "pause", "mail.out")
    command(house, "tasks", "cancel", str(house.tasks["mail"]))
    command(house, "keys", "create", "webshop")
    found = lines(house)
    assert [(line.act, line.kind) for line in found] == [("create", "key"), ("cancel", "task"), ("pause", "queue")]
    assert {line.who for line in found} == {f"{getpass.getuser()}@{socket.gethostname()}"}
    shown = json.loads(command(house, "audit", "--kind", "task", "--json").output)["entries"]
    assert [entry["target"] for entry in shown] == [str(house.tasks["mail"])]
    assert "pause" in command(house, "audit", "--who", getpass.getuser(), "--since", "1h").output
    assert "No matching" in command(house, "audit", "--who", "nobody").output


def test_a_key_that_is_made_by_command_has_its_quotas(house: House) -> None:
    made = json.loads(
        command(house, "keys", "create", "guest", "--quota", "rate=10", "--quota", "queues=0", "--json").output
    )
    listed = json.loads(command(house, "keys", "list", "--json").output)["keys"]
    [found] = [key for key in listed if key["id"] == made["id"]]
    assert found["quotas"] == msgspec.structs.asdict(Quotas(rate=10, queues=0))
    assert lines(house)[0].detail["quotas"] == "rate=10, queues=0"


def test_a_process_can_set_its_name_for_the_audit_log(house: House) -> None:
    clear_audit(house)
    backend = Backend(house.settings.__class__(**vars(house.settings) | {"audit_as": "deploy of shop 4.2"}))
    backend.queues.pause("mail.out", True)
    backend.close()
    assert [line.who for line in lines(house)] == ["deploy of shop 4.2"]


def test_actions_that_change_nothing_write_no_audit_entry(house: House) -> None:
    backend = Backend(house.settings)
    clear_audit(house)
    backend.workflows.apply(backend.workflows.latest("mail-flow").definition)
    with pytest.raises(Exception, match="is not paused"):
        backend.schedules.resume("mail-flow/default")
    backend.close()
    assert lines(house) == []


def test_repeated_pauses_and_resumes_of_a_queue_write_one_entry_each(house: House) -> None:
    clear_audit(house)
    for verb in ("resume", "pause", "pause", "resume", "resume"):
        assert house.send("POST", f"/api/v1/queues/mail.out/{verb}").status_code == 200
    with house.engine.connect() as connection:
        asked = connection.exec_driver_sql("SELECT count(*) FROM orchestrator.inbox WHERE kind = 'queues'")
        assert asked.scalar() == 2, "and the leader is told of what has changed alone"
    assert [line.act for line in lines(house)] == ["resume", "pause"]


def test_the_log_is_listed_over_http_page_by_page(house: House) -> None:
    clear_audit(house)
    key = house.make_key(None, None)
    for name in ("a", "b", "c"):
        house.send("POST", f"/api/v1/queues/{name}/pause?new=true", key)
    first = house.get("/api/v1/audit?limit=2&kind=queue", key)
    second = house.get(f"/api/v1/audit?limit=2&kind=queue&cursor={first['next']}", key)
    assert [entry["target"] for entry in first["items"] + second["items"]] == ["c", "b", "a"]
    assert second["next"] is None


@pytest.mark.parametrize("path", ["tasks/{task}/cancel", "runs/{run}/cancel", "backfills/{backfill}/cancel"])
def test_actions_outside_the_key_scope_are_audited_as_refused(house: House, path: str) -> None:
    clear_audit(house)
    place = path.format(task=house.tasks["bank"], run=house.runs["bank"], backfill=house.backfills["bank"])
    answer = house.send("POST", f"/api/v1/{place}")
    assert answer.status_code == 404  # as if it did not exist
    line = lines(house)[0]
    assert (line.act, line.who, line.detail) == ("refused", f"bound ({house.key.id})", {"status": 404})
    assert place.split("/")[1] in line.target
    nothing = "backfills/999999" if "backfill" in path else f"tasks/{UUID(bytes=new_id())}"
    assert house.send("POST", f"/api/v1/{nothing}/cancel").status_code == 404
    assert len(lines(house)) == 1  # no entry for missing objects


def test_old_audit_entries_are_pruned(house: House) -> None:
    clear_audit(house)
    house.send("POST", "/api/v1/queues/mail.out/pause")
    house.send("POST", "/api/v1/queues/mail.out/resume")
    with house.engine.connect() as connection:
        connection.exec_driver_sql(
            "UPDATE orchestrator.audit SET at = now() - %s WHERE act = 'pause'", (timedelta(days=400),)
        )
        assert audit.prune(connection, 365 * 86_400.0, 1_000) == 1
    assert [line.act for line in lines(house)] == ["resume"]


def test_an_oversized_audit_entry_is_truncated(house: House) -> None:
    with house.engine.connect() as connection:
        audit.add(connection, who="a\0b" * 1_000, origin="", act="x", kind="x", target="", detail={})
        with pytest.raises(exc.DBAPIError):
            connection.exec_driver_sql("INSERT INTO orchestrator.audit (who) VALUES ('x')")
    assert lines(house, act="x")[0].who == ("ab" * 1_000)[:300]
