"""Bulk actions and API keys in the dashboard: counted beforehand, audited afterwards, limited by scope."""

from __future__ import annotations

import json
import re
import time
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any
from urllib.parse import quote, urlencode
from uuid import UUID, uuid4

import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, event

from orchestrator.api import access
from orchestrator.api.dashboard import words
from orchestrator.cli import main
from orchestrator.domain.access import Scope
from orchestrator.domain.fleet.announced import Standby
from orchestrator.domain.ids import time_ordered_id
from orchestrator.domain.quotas import Quotas
from orchestrator.domain.redaction import HIDDEN
from orchestrator.sdk.backend import Backend
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.by_name import call_by_name
from orchestrator.sdk.values.payload import decode_call, decode_value
from orchestrator.store import fleet
from orchestrator.store.fleet import WorkerRow
from orchestrator.store.insights import run_lists, tasks
from orchestrator.transport import announcements
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys
from tests.emptying import empty
from tests.integration import api_client
from tests.integration.api_house import House, changes
from tests.integration.test_dashboard import make_key
from tests.integration.visitor import Visitor
from tests.integration.waiting_house import code_that_asks
from tests.waiting import eventually


@pytest.fixture
def house(furniture: House, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(access, "_KEY_TTL", 0.0)
    monkeypatch.setattr(access, "_MAX_WRONG_KEYS", 10_000)
    with furniture.engine.connect() as connection:
        empty(connection, "api_keys", "inbox", "audit")
    return furniture


def rows(house: House, statement: str) -> list[Any]:
    with house.engine.connect() as connection:
        return [tuple(row) for row in connection.exec_driver_sql(statement)]


def test_open_tasks_are_counted_before_they_are_cancelled(house: House) -> None:
    visitor = Visitor(house.app)
    assert "/ui/tasks/cancel?queue=mail.out" in visitor.get("/ui/tasks?queue=mail.out").text
    assert "Cancel all open" not in visitor.get("/ui/tasks?status=failed").text
    assert "Retry all failed" in visitor.get("/ui/tasks?status=failed").text
    assert "Retry all failed" not in visitor.get("/ui/tasks?argument=1").text, "it would retry those with others"
    assert "Choose at least one filter" in visitor.get("/ui/tasks/cancel").text
    page = visitor.get("/ui/tasks/cancel?queue=mail.out").text
    assert "Cancel 1 task<" in page
    until = re.search(r'name="until" value="([^"]*)"', page)
    assert until is not None
    with house.engine.connect() as connection:  # a task created after the count stays open
        connection.exec_driver_sql(
            "INSERT INTO orchestrator.tasks (id, name, queue, payload, created_at)"
            " VALUES (gen_random_uuid(), 'late', 'mail.out', '', now() + interval '1 minute')"
        )
    visitor.post("/ui/tasks/cancel", queue="mail.out", until=until[1], back="/ui/tasks")
    assert visitor.said() == "Tasks being cancelled: 1."
    assert rows(house, "SELECT kind, target FROM orchestrator.inbox") == [("cancel task", house.tasks["mail"])]
    assert rows(house, "SELECT act, kind, target, detail->>'tasks' FROM orchestrator.audit") == [
        ("cancel", "open tasks", "mail.out", "1")
    ]
    rows(house, "DELETE FROM orchestrator.tasks WHERE name = 'late' RETURNING id")


def test_a_bulk_cancel_requires_filters_and_respects_key_restrictions(house: House) -> None:
    before = changes(house)
    visitor = Visitor(house.app)
    visitor.get("/ui/tasks")
    visitor.post("/ui/tasks/cancel", back="/ui/tasks")
    assert "Specify at least one filter" in visitor.said()
    visitor.post("/ui/tasks/cancel", status="failed", back="/ui/tasks")
    assert "Expected states of open tasks" in visitor.said()
    assert changes(house) == before
    bound = Visitor(house.app)
    bound.log_in(make_key(house, Scope.OPERATE, "mail.", "mail-"))
    assert "bank" not in bound.get("/ui/tasks/cancel?status=pending").text
    bound.post("/ui/tasks/cancel", status="pending")
    assert rows(house, "SELECT target FROM orchestrator.inbox") == [(house.tasks["mail"],)]


def test_a_key_is_created_shown_once_and_revoked(house: House) -> None:
    visitor = Visitor(house.app)
    visitor.log_in(make_key(house, Scope.ADMIN))
    visitor.get("/ui/keys")
    made = visitor.post(
        "/ui/keys", name="webshop", scope="read", days="30", queues="mail.", quotas="rate=10, priority=-5"
    ).text
    secret = re.search(r'data-copy="(orc_[^"]+)"', made)
    assert secret is not None
    page = visitor.get("/ui/keys").text
    assert secret[1] not in page
    assert "rate 10, priority -5" in page
    assert re.search(r"Default quotas.*rate 5,000.*open_tasks 10,000,000", page)
    assert rows(house, "SELECT quotas FROM orchestrator.api_keys WHERE name = 'webshop'") == [
        ({"rate": 10, "priority": -5},)
    ]
    shopper = Visitor(house.app)
    assert shopper.log_in(secret[1]).status_code == 303
    assert shopper.get("/ui/tasks").status_code == 200
    assert shopper.get("/ui/keys").status_code == 403
    assert shopper.post("/ui/keys", name="more", scope="admin").status_code == 403
    ((id,),) = rows(house, "SELECT id FROM orchestrator.api_keys WHERE name = 'webshop' AND expires_at > now()")
    visitor.post("/ui/keys/revoke", id=id, back="/ui/keys")
    assert visitor.said() == "The key was revoked."
    assert shopper.get("/ui/tasks").status_code == 303
    visitor.post("/ui/keys/revoke", id="nobody", back="/ui/keys")
    assert "There is no key" in visitor.said()
    acts = rows(
        house, "SELECT act, target, detail FROM orchestrator.audit WHERE kind = 'key' AND act <> 'log in' ORDER BY id"
    )
    assert [(act, target) for act, target, _ in acts] == [("create", id), ("revoke", id)]
    assert secret[1].rpartition("_")[2] not in str(acts)


def test_invalid_keys_are_not_created(house: House) -> None:
    visitor = Visitor(house.app)
    assert "--scope admin" in visitor.get("/ui/keys").text, "who has the first one makes the others"
    forms: list[dict[str, Any]] = [{"name": ""}, {"name": "x", "scope": "everything"}, {"name": "x", "days": "0"}]
    forms += [{"name": "x", "quotas": quotas} for quotas in ("rate", "rate=no", "rate=-1", "speed=1")]
    for form in forms:
        visitor.post("/ui/keys", back="/ui/keys", **form)
        assert visitor.said(), form
    assert rows(house, "SELECT id FROM orchestrator.api_keys") == []


def test_a_backfill_range_is_shown_in_the_schedules_time_zone(house: House) -> None:
    backend = Backend(house.settings)
    try:
        backend.schedules.set("mail-flow", {"cron": "0 3 * * *", "timezone": "Asia/Tokyo", "name": "tokyo"})
        backend.schedules.backfill("mail-flow/tokyo", "2026-02-10", "2026-02-12", None, False)
    finally:
        backend.close()
    assert "2026-02-10 to 2026-02-12" in Visitor(house.app).get("/ui/schedules").text


def test_a_backfill_without_starts_is_drawn_as_skipped(house: House) -> None:
    backend = Backend(house.settings)
    try:
        number = backend.schedules.backfill("mail-flow/default", "2026-02-10", "2026-02-13", None, False)
    finally:
        backend.close()
    with house.engine.connect() as connection:
        connection.exec_driver_sql("UPDATE orchestrator.backfills SET passed = total WHERE id = %s", (number,))
    page = Visitor(house.app).get("/ui/schedules").text
    row = re.search(rf'<tr data-key="backfill-{number}">.*?</tr>', page, re.DOTALL)
    assert row, "it is listed"
    assert "0 started, 3 already had a run" in row[0]
    assert re.findall(r"<title>(.*?)</title>", row[0]) == ["3 skipped"]


def test_failures_are_drawn_over_time(house: House) -> None:
    with house.engine.connect() as connection:
        for name, minutes in (("mail", 29), ("bank", 0)):
            connection.exec_driver_sql(
                "UPDATE orchestrator.ended_tasks SET ended_at = now() - %s * interval '1 minute' WHERE id = %s",
                (minutes, house.failed[name].hex),
            )
    page = Visitor(house.app).get("/ui/failures?within=1h").text
    charts = re.findall(r'<svg class="bars"[^>]*aria-label="E in the last 1h">.*?</svg>', page, re.DOTALL)
    bars = [re.findall(r'<rect class="s-failed" x="([\d.]+)"', chart) for chart in charts]
    assert sorted(round(float(x)) for (x,) in bars) == [12, 23], "one failed half an hour ago, the other just now"


def test_different_messages_of_one_kind_of_error_are_different_groups(house: House) -> None:
    messages = [
        *(f"Expecting value: line {line} column 1 of '{line}.json'" for line in range(3)),
        *("Expecting property name: line 1", "Expecting property name: line 22"),
        "task 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17 has gone",
        "task 0199b2f4-8d5c-7a3e-9c41-5b0d6f2a8e18 has gone",
        "can't connect: no such table",
        "card declined",
    ]
    frames = ("/srv/shop.py", 41, "pay"), ("/usr/lib/python3.11/json/decoder.py", 9, "decode")
    traceback = "".join(f'  File "{file}", line {line}, in {name}\n    x()\n' for file, line, name in frames)
    copies = []
    with house.engine.connect() as connection:
        for message in messages:
            copies.append(uuid4().hex)
            connection.exec_driver_sql(
                """
                INSERT INTO orchestrator.ended_tasks
                SELECT (jsonb_populate_record(t, jsonb_build_object('id', %s::uuid, 'name', 't.json', 'ended_at', now(),
                        'error', jsonb_build_object('kind', 'V', 'message', %s::text, 'traceback', %s::text)))).*
                  FROM orchestrator.ended_tasks t WHERE id = %s
                """,
                (copies[-1], message, traceback, house.failed["mail"].hex),
            )
    try:
        visitor = Visitor(house.app)
        page = unescape(visitor.get("/ui/failures?within=15m").text)
        groups = re.findall(r'<tr data-key="t.json-mail.out-(V#[0-9a-f]{6})">(.*?)</tr>', page, re.DOTALL)
        assert [re.findall(r'number">(\d+)<', row) for _, row in groups] == [["3"], ["2"], ["2"], ["1"], ["1"]]
        (declined,) = (row for _, row in groups if "card declined" in row)
        assert 'at <span class="mono">shop.py:41 in pay</span>, such as' in declined
        assert '<span class="mono">{"text": "mail"}' not in declined
        assert f'href="/ui/tasks/{UUID(copies[-1])}"' in declined
        assert "first " in declined
        assert "narrow" in declined
        counted = visitor.get("/ui/tasks/retry?" + urlencode({"name": "t.json", "kind": groups[0][0]})).text
        assert "Retry 3 tasks<" in counted
        assert "Retry 9 tasks<" in visitor.get("/ui/tasks/retry?name=t.json&kind=V").text
        visitor.post("/ui/failures/t.json/mail.out/" + quote(groups[0][0]) + "/acknowledge", back="/ui/failures")
        page = visitor.get("/ui/failures?within=15m").text
        assert len(re.findall("acknowledged by ", page)) == 1, "the others are other failures"
    finally:
        with house.engine.connect() as connection:
            connection.exec_driver_sql("DELETE FROM orchestrator.ended_tasks WHERE id = ANY(%s::uuid[])", (copies,))


def make_worker(house: House, name: str, parent: str | None, memory: int | None = None) -> None:
    row = WorkerRow(name, "web", 7, ["default"], [], 10, 1, "live", 0.0, parent=parent, memory=memory)
    with house.engine.connect() as connection:
        fleet.mirror(connection, [row], datetime.now(UTC))
        connection.exec_driver_sql("UPDATE orchestrator.workers SET seen_at = now() + interval '1 hour'")


@contextmanager
def leading(house: House) -> Iterator[None]:
    """Hold the lease as a leader that does nothing."""
    with house.engine.connect() as connection:
        connection.exec_driver_sql(
            "INSERT INTO orchestrator.leases (shard, owner, address, term, expires_at)"
            " VALUES (0, gen_random_uuid(), 'web:1', 1, now() + interval '1 minute')"
        )
        try:
            yield
        finally:
            empty(connection, "leases")


def test_draining_a_worker_requires_confirmation_and_the_operate_scope(house: House) -> None:
    with house.engine.connect() as connection:
        empty(connection, "workers", "drains")
    parent = str(uuid4())
    for name, weight in (("web-1-aa", 200 * 2**20), ("web-1-bb", 100 * 2**20)):
        make_worker(house, name, parent, weight)
    make_worker(house, "old-1-cc", None)
    reader = Visitor(house.app)
    reader.log_in(make_key(house, Scope.READ))
    page = reader.get("/ui/workers").text
    assert "web-1-aa" in page
    assert ">200 MB<" in page
    assert "Drain" not in page
    reader.post("/ui/workers/web-1-aa/drain", back="/ui/workers")
    assert rows(house, "SELECT parent::text FROM orchestrator.drains") == []
    visitor = Visitor(house.app)
    visitor.log_in(make_key(house, Scope.OPERATE))
    page = visitor.get("/ui/workers").text
    assert page.count("Drain…") == 1, "once for the two processes of a worker, and not for one that cannot be told"
    assert "with all of its 2 processes? It accepts no new tasks" in page
    visitor.post("/ui/workers/web-1-aa/drain", back="/ui/workers")
    assert visitor.said() == "Worker web-1 is draining: it takes no more tasks, finishes those it runs, and exits."
    assert rows(house, "SELECT parent::text FROM orchestrator.drains") == [(parent,)]
    with leading(house):
        eventually(lambda: "s-draining" in visitor.get("/ui/workers").text)
        page = visitor.get("/ui/workers").text
    assert page.count("s-draining") == 2
    assert "Drain…" not in page
    assert rows(house, "SELECT kind, target FROM orchestrator.audit WHERE act = 'drain'") == [("worker", "web-1")]


def test_standby_schedulers_are_shown_beside_the_leader(house: House) -> None:
    redis, keys = connect(house.settings.redis_url), Keys.of(house.settings)
    visitor = Visitor(house.app)
    visitor.log_in(make_key(house, Scope.READ))
    announcements.announce(redis, keys, "b", Standby(address="second.example.com:8", since=datetime.now(UTC)), 600.0)
    try:
        for page in ("/ui/workers", "/ui"):  # a cached page may be shown once more
            eventually(lambda page=page: ">second<" in visitor.get(page).text, f"{page} names it")  # type: ignore[misc]
        with_key = make_key(house, Scope.READ)
        found = house.get("/api/v1/status", with_key)
        assert [one["address"] for one in found["standbys"]] == ["second.example.com:8"]
    finally:
        announcements.withdraw(redis, keys, "b")
        redis.close()


def test_a_pause_is_undone_from_its_notice(house: House) -> None:
    visitor = Visitor(house.app)
    for path in ("/ui/queues/mail.out", "/ui/schedules/mail-flow/default"):
        visitor.get("/ui")
        visitor.post(f"{path}/pause", back="/ui/queues")
        page = visitor.get("/ui/queues").text
        assert re.search(r'class="said.*form="undo"[^>]*>Undo</button>', page)
        assert f'<form id="undo" method="post" action="{path}/resume">' in page
        assert "Undo" not in visitor.get("/ui/queues").text, "it is offered once"
        visitor.post(f"{path}/resume", back="/ui/queues")
        assert f'action="{path}/pause"' in visitor.get("/ui/queues").text
    assert rows(house, "SELECT paused FROM orchestrator.queues WHERE name = 'mail.out'") == [(False,)]
    visitor.post("/ui/queues/mail.out/limits", concurrency="7", back="/ui/queues")
    assert 'id="undo"' not in visitor.get("/ui/queues").text, "the limits before are not known"


def test_a_forged_notice_cannot_offer_another_action_as_undo(house: House) -> None:
    """The cookie cannot be trusted: another party may have set it."""
    visitor = Visitor(house.app)
    for path in ("/ui/queues/mail.out/purge", "https://evil.example/ui/queues/a/pause", "/ui/keys/revoke"):
        said = urlsafe_b64encode(json.dumps(["Paused.", False, path]).encode()).decode()
        visitor.cookies["orchestrator_said"] = said
        page = visitor.get("/ui/queues").text
        assert ">Paused.</p>" in page
        assert "Undo" not in page


def test_an_unresponsive_worker_can_be_drained_from_its_warning(house: House) -> None:
    with house.engine.connect() as connection:
        empty(connection, "workers", "drains")
        row = WorkerRow("web-1-aa", "web", 7, ["default"], [], 10, 1, "live", 0.0, still=9.0, parent=str(uuid4()))
        fleet.mirror(connection, [row], datetime.now(UTC))
        connection.exec_driver_sql("UPDATE orchestrator.workers SET seen_at = now() + interval '1 hour'")
    visitor = Visitor(house.app)
    visitor.log_in(make_key(house, Scope.OPERATE))
    found = re.search(r'data-key="worker stands still-web-1-aa".*?action="([^"]*)"', visitor.get("/ui").text, re.DOTALL)
    assert found, "it has a button"
    visitor.post(found[1], back="/ui")
    assert len(rows(house, "SELECT parent FROM orchestrator.drains")) == 1
    reader = Visitor(house.app)
    reader.log_in(make_key(house, Scope.READ))
    page = reader.get("/ui").text
    assert "unresponsive" in page
    assert "Drain" not in page


def form_of(page: str) -> dict[str, str]:
    """Return the prefilled values of the form for a new task."""
    texts = dict(re.findall(r'<textarea name="(\w+)"[^>]*>(.*?)</textarea>', page, re.DOTALL))
    return {name: unescape(text) for name, text in texts.items()}


def stored_task(house: House, **options: Any) -> str:
    backend = Backend(house.settings)
    try:
        kwargs = {"to": "ada", "password": "hunter22", "since": datetime(2026, 1, 2, tzinfo=UTC)}
        task = call_by_name(
            house.settings, "t.a", [1, "two"], kwargs, options={"queue": "mail.out", **options}, queue="default"
        )
        return str(UUID(bytes=backend.tasks.enqueue(task)))
    finally:
        backend.close()


def test_filters_and_search_find_tasks_beyond_the_scan_limit(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "MAX_SCANNED", 2)
    rare = [stored_task(house, queue="mail.rare") for _ in range(2)]
    for _ in range(6):
        stored_task(house)
    rows(house, f"UPDATE orchestrator.tasks SET name = 't.rare' WHERE id = '{rare[0]}' RETURNING id")
    visitor = Visitor(house.app)
    found = re.findall(r'href="/ui/tasks/([0-9a-f-]{36})"', visitor.get("/ui/tasks?queue=mail.rare").text)
    assert {*found} == {*rare}
    assert rare[0] in visitor.get("/ui/tasks?name=t.rare").text
    assert rare[0] in visitor.get("/ui/search?text=t.rare").text


def test_a_numeric_signal_value_can_be_sent_as_text(house: House) -> None:
    run, visitor = code_that_asks(house, "mail"), Visitor(house.app)
    visitor.get("/ui")
    chosen: list[dict[str, Any]] = [{}, {"as": "text"}]
    for more in chosen:
        visitor.post(f"/ui/runs/{run}/signals/told", value="123", **more)
    sent = f"SELECT body->>'value' FROM orchestrator.inbox WHERE target = '{run}' ORDER BY id"
    assert [decode_value(b64decode(value)) for (value,) in rows(house, sent)] == [123, "123"]


def test_a_copied_task_keeps_unchanged_values(house: House) -> None:
    id = stored_task(house, redact=["password"], retries=7, priority=3)
    visitor = Visitor(house.app)
    assert f'href="/ui/tasks/{id}/again"' in visitor.get(f"/ui/tasks/{id}").text
    form = form_of(visitor.get(f"/ui/tasks/{id}/again").text)
    assert json.loads(form["args"]) == [1, "two"]
    named = json.loads(form["kwargs"])
    assert (named["to"], named["password"]) == ("ada", HIDDEN)
    sent = visitor.post(f"/ui/tasks/{id}/again", args="[1, 2]", kwargs=json.dumps(named | {"to": "bob"}))
    new = sent.headers["Location"].rpartition("/")[2]
    assert visitor.said().startswith("The task was enqueued: this is the new task")
    columns = "payload, queue, priority, options, parent_id"
    [(payload, queue, priority, options, parent)] = rows(
        house, f"SELECT {columns} FROM orchestrator.tasks WHERE id = '{new}'"
    )
    args, kwargs, *_ = decode_call(bytes(payload))
    assert (args, kwargs["to"], kwargs["password"]) == ([1, 2], "bob", "hunter22")
    assert kwargs["since"] == datetime(2026, 1, 2, tzinfo=UTC), "JSON has no times"
    assert (queue, priority, str(parent)) == ("mail.out", 3, id)
    assert rows(house, f"SELECT options FROM orchestrator.tasks WHERE id = '{id}'") == [(options,)]
    assert "hunter22" not in visitor.get(f"/ui/tasks/{new}").text


def test_values_without_a_json_form_are_kept_and_not_editable(house: House) -> None:
    backend = Backend(house.settings)
    given = {"a": float("nan"), "b": 1, "c": b"\x00\xff"}
    try:
        task = call_by_name(
            house.settings, "t.a", [given, float("-inf"), 5], {}, options={"queue": "mail.out"}, queue="default"
        )
        id = str(UUID(bytes=backend.tasks.enqueue(task)))
    finally:
        backend.close()
    visitor = Visitor(house.app)
    for path in (f"/ui/tasks/{id}", f"/ui/tasks/{id}/again"):
        page = unescape(visitor.get(path).text)
        assert '"(not JSON: NaN)"' in page
        assert '"(not JSON: -Infinity)"' in page
        assert "2 bytes" in page
        assert "AP8=" not in page
    typed = json.loads(form_of(visitor.get(f"/ui/tasks/{id}/again").text)["args"])
    before = changes(house)
    answer = visitor.post(f"/ui/tasks/{id}/again", args=json.dumps([typed[0] | {"b": 2}, *typed[1:]]), kwargs="{}")
    assert answer.status_code == 422
    assert "0 contains values that JSON cannot represent, such as NaN or bytes. Leave it unchanged" in unescape(
        answer.text
    )
    assert changes(house) == before
    sent = visitor.post(f"/ui/tasks/{id}/again", args=json.dumps([*typed[:2], 6]), kwargs="{}")
    new = sent.headers["Location"].rpartition("/")[2]
    [(payload,)] = rows(house, f"SELECT payload FROM orchestrator.tasks WHERE id = '{new}'")
    (first, second, third), *_ = decode_call(bytes(payload))
    assert repr(first["a"]) == "nan"
    assert (first["b"], first["c"], second, third) == (1, b"\x00\xff", float("-inf"), 6)


def test_a_copy_is_offered_only_if_the_key_permits_the_task(house: House) -> None:
    id = stored_task(house)
    for prefix, is_offered in (("t.", True), ("other.", False)):
        visitor = Visitor(house.app)
        visitor.log_in(house.make_key(None, None, Scope.OPERATE, prefix))
        assert ("/again" in visitor.get(f"/ui/tasks/{id}").text) is is_offered


def test_invalid_form_input_gets_a_helpful_message(house: House) -> None:
    visitor = Visitor(house.app)
    visitor.get("/ui")
    for given, said in (
        ("many", "Concurrency: give a whole number, or leave it empty."),
        ("-3", "Concurrency: give a whole number, at least"),
    ):
        visitor.post("/ui/queues/mail.out/limits", back="/ui/queues", concurrency=given)
        assert said in visitor.said()
    page = visitor.get("/ui/runs?attribute=zz")
    assert page.status_code == 422
    assert (
        "Attribute: expected NAME=VALUE, NAME!=VALUE or a range with < <= > or >=, such as stage=paid, stage!=paid or "
        "total>=100; found 'zz'." in unescape(page.text)
    )
    assert "The workflow cannot" not in page.text
    page = visitor.get("/ui/compare?" + "&".join(f"run={uuid4()}" for _ in range(3)))
    assert page.status_code == 422
    assert "3 runs are marked. Go back and mark exactly two." in page.text


@pytest.mark.parametrize(
    ("path", "heading", "said"),
    [
        ("/ui/runs?attribute=%3Cb%3E", "Runs", "total>=100; found '<b>'"),
        ("/ui/failures?since=2999-01-01T00:00", "Failures", "Choose a start that is before"),
        (f"/ui/search?text={5000 * 'x'}", "Search", "Text: give a different value, at most 500 characters."),
        ("/ui/tasks?status=odd&queue=mail.out", "Tasks", "odd"),
    ],
)
def test_an_invalid_filter_is_explained_on_its_page(house: House, path: str, heading: str, said: str) -> None:
    answer = Visitor(house.app).get(path)
    page = unescape(answer.text)
    assert answer.status_code == 422
    assert f"<h1>{heading}</h1>" in page
    message = re.search(r'<p class="said bad"[^>]* data-refused>(.*?)</p>', page)
    assert message is not None
    assert said in message[1]
    assert "bank.out" not in page or "queue=mail.out" not in path, "what fits is kept"


@pytest.mark.parametrize("path", ["/ui/tasks?status=odd&name=t.a", "/ui/runs?status=odd&workflow=mail-flow"])
def test_a_list_with_an_invalid_filter_offers_no_bulk_actions(house: House, path: str) -> None:
    """Bulk actions would apply to more than the user requested."""
    offers = re.compile(r">(?:Retry|Cancel|Delete) (?:marked|all)|data-all")
    assert offers.search(Visitor(house.app).get(path.replace("status=odd&", "")).text)
    page = Visitor(house.app).get(path)
    assert page.status_code == 422
    assert "data-key" in page.text.partition("<tbody")[2], "what fits is listed"
    assert not offers.search(page.text)


def test_a_preview_with_an_invalid_filter_offers_nothing(house: House) -> None:
    """Without the filter, the action would apply to more tasks than the user requested."""
    for path in ("/ui/tasks/cancel?status=odd&queue=mail.out", "/ui/tasks/retry?since=odd&queue=mail.out"):
        answer = Visitor(house.app).get(path)
        assert answer.status_code == 422
        assert "mail.out" not in answer.text.partition("<main")[2]


def test_running_tasks_of_a_worker_are_listed_and_counted(house: House) -> None:
    with house.engine.connect() as connection:
        empty(connection, "workers", "drains")
        row = WorkerRow("web-1-aa", "web", 7, ["default"], [], 10, 8, "live", 0.0)
        fleet.mirror(connection, [row], datetime.now(UTC))
        for _ in range(5):
            connection.exec_driver_sql(
                "INSERT INTO orchestrator.tasks (id, name, queue, payload, status, worker, started_at)"
                " VALUES (gen_random_uuid(), 'busy', 'mail.out', '', 'running', 'web-1-aa', now())"
            )
    page = Visitor(house.app).get("/ui/workers").text
    assert "<small>8 of 10</small>" in page
    assert page.count(">busy</a>") == 3
    assert "and 5 more" in page
    rows(house, "DELETE FROM orchestrator.tasks WHERE name = 'busy' RETURNING id")


def test_the_page_of_a_worker_has_its_slots_and_memory(house: House) -> None:
    with house.engine.connect() as connection:
        empty(connection, "workers", "drains")
    make_worker(house, "web-1-aa", None, memory=300_000_000)
    page = Visitor(house.app).get("/ui/workers/web-1-aa").text
    assert "<dt>Slots busy</dt><dd>1 of 10 " in page
    assert "<dt>Memory</dt><dd>286 MB" in page


def test_each_attempt_shows_its_own_outcome_and_error(house: House) -> None:
    task = house.failed["mail"]
    rows(
        house,
        "INSERT INTO orchestrator.attempts (task_id, attempt, outcome, error, worker, started_at, ended_at)"
        f" SELECT '{task}', n, CASE n WHEN 101 THEN 'failed' ELSE 'lost' END,"
        """ jsonb_build_object('kind', 'First', 'message', 'cause ' || n), 'w-' || n, now(), now()"""
        " FROM generate_series(101, 102) AS n RETURNING attempt",
    )
    try:
        page = Visitor(house.app).get(f"/ui/tasks/{task}").text
    finally:
        rows(house, f"DELETE FROM orchestrator.attempts WHERE task_id = '{task}' RETURNING attempt")
    for attempt, outcome in ((101, "failed"), (102, "lost")):
        row = re.search(rf'<tr data-key="attempt-{attempt}">.*?</tr>', page, re.DOTALL)
        assert row is not None
        assert f'class="state s-{outcome}"' in row[0]
        assert f"cause {attempt}" in row[0]
        assert f"w-{attempt}" in row[0]
        assert f"/log?attempt={attempt}" in row[0]
    assert "Attempt 102: lost" in page


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("tasks?since=yesterday", "From: give a time, such as 2026-01-31T09:30Z."),
        ("tasks?status=pending&status=odd", "State: 'odd' is not one of pending, dispatched, running, success, failed"),
        ("tasks?run=12", "Run: give an id, such as 0199"),
        ("tasks?cursor=12", "This page of the list does not exist: go to the first page."),
        ("tasks?colour=red", "This page has no filter colour. It has: status, queue, name"),
        ("tasks?since=2026-02-01T00:00Z&until=2026-01-01T00:00Z", "From 2026-02-01 00:00 is later than To 2026-01-01"),
        ("runs?since=2026-02-01T00:00Z&until=2026-01-01T00:00Z", "From 2026-02-01 00:00 is later than To 2026-01-01"),
        ("tasks?name=a%00b", "A string contains a NUL character, which cannot be stored or searched for: remove it."),
        ("tasks/{task}/log?after=x", "After: invalid value. Remove it."),
        ("runs?sort=size", "Sort: 'size' is not one of -ended"),
        ("runs?version=x", "Version: give a whole number"),
        ("failures?within=3h", "Within: '3h' is not one of 15m, 1h, 24h, 7d."),
        ("failures?sort=size", "Sort: 'size' is not one of -first, -last"),
        ("tasks/retry?since=z", "From: give a time, such as"),
        ("tasks/12", "'12' is not a valid id: expected one such as 0199b2f4-"),
    ],
)
def test_invalid_addresses_are_explained_in_terms_of_the_page(house: House, address: str, said: str) -> None:
    answer = Visitor(house.app).get(f"/ui/{address.replace('{task}', str(house.failed['mail']))}")
    assert answer.status_code in (404, 422)
    main = unescape(answer.text.partition("<main")[2])
    assert said in main, main[:600]
    assert not re.search("Invalid|Expected `|Object|regex|UUID|PostgreSQL", main)


def test_a_range_filter_on_text_warns_that_numbers_never_match(house: House) -> None:
    visitor = Visitor(house.app)
    said = "<code>total&gt;=abc</code> compares strings: runs whose total is a number do not match."
    assert said in visitor.get("/ui/runs?attribute=total%3E%3Dabc").text
    for fine in ("total>=100", "day>=2026-01-31", "stage=paid", "stage!=paid"):
        assert "compares strings" not in visitor.get(f"/ui/runs?attribute={quote(fine)}").text


def test_attempts_that_no_worker_started_are_explained(house: House) -> None:
    task = house.failed["mail"]
    rows(
        house,
        "INSERT INTO orchestrator.attempts (task_id, attempt, outcome, error, worker, started_at, ended_at)"
        f" SELECT '{task}', n, 'failed', jsonb_build_object('kind', 'Loud', 'message', chr(27) || '[31mred cause'),"
        " 'w-1', now(), now() FROM unnest(ARRAY[2, 3, 5, 9000]) AS n RETURNING attempt",
    )
    rows(house, f"UPDATE orchestrator.ended_tasks SET attempt = 9001 WHERE id = '{task}' RETURNING id")
    try:
        page = Visitor(house.app).get(f"/ui/tasks/{task}").text
        servers = {
            f"ORCHESTRATOR_{name.upper()}": getattr(house.settings, name) for name in ("database_url", "redis_url")
        }
        told = CliRunner().invoke(main, ["tasks", "show", str(task)], env=servers).output
    finally:
        rows(house, f"DELETE FROM orchestrator.attempts WHERE task_id = '{task}' RETURNING attempt")
        rows(house, f"UPDATE orchestrator.ended_tasks SET attempt = 1 WHERE id = '{task}' RETURNING id")
    shown = re.findall(r'<tr data-key="attempt-(\d+)">.*?</td><td class="main"[^>]*>(.*?)</td>', page, re.DOTALL)
    assert [int(number) for number, _ in shown] == [1, 2, 3, 4, 5, 6, 9000, 9001]
    texts = {int(number): text for number, text in shown}
    for number in (1, 4):
        assert "handed back before it began" in texts[number]
        assert "/log?" not in texts[number]
    assert "6 to 8,999 do not exist" in texts[6]
    assert "and 2 handed back before they began" in page
    assert "Loud: red cause" in told, "without the colours of a terminal"
    assert "\nAttempt 4 was dispatched, and handed back before it began" in told


def test_an_invalid_task_form_keeps_its_input(house: House) -> None:
    id = stored_task(house, redact=["password"])
    before = changes(house)
    visitor = Visitor(house.app)
    visitor.get("/ui")
    for args, kwargs, wrong in (
        ("[1", "{}", ">expected a JSON list"),
        ("{}", "{}", ">expected a JSON list"),
        ("[]", "[]", ">expected a JSON object"),
        ("[]", json.dumps({"other": HIDDEN}), "is partly hidden"),
        ("[]", json.dumps({"password": f"{HIDDEN}!"}), "is partly hidden"),
    ):
        answer = visitor.post(f"/ui/tasks/{id}/again", args=args, kwargs=kwargs)
        assert answer.status_code == 422
        assert wrong in unescape(answer.text)
        assert form_of(answer.text) == {"args": args, "kwargs": kwargs}
        assert "no-store" not in answer.headers["Cache-Control"], "the browser goes back to it"
    assert changes(house) == before


def test_copying_a_task_needs_access_to_both_queues(house: House) -> None:
    id = stored_task(house)
    reader, bound = Visitor(house.app), Visitor(house.app)
    reader.log_in(make_key(house, Scope.ENQUEUE))
    assert "/again" not in reader.get(f"/ui/tasks/{id}").text
    assert reader.get(f"/ui/tasks/{id}/again").status_code == 403
    bound.log_in(make_key(house, Scope.OPERATE, "mail.", "mail-"))
    before = changes(house)
    answer = bound.post(f"/ui/tasks/{id}/again", args="[]", kwargs="{}", queue="bank.out")
    assert (answer.status_code, form_of(answer.text)["args"]) == (403, "[]")
    bound.post(f"/ui/tasks/{house.tasks['bank']}/again", args="[]")
    assert "No task has the id" in bound.said()
    assert changes(house) == before


@pytest.mark.parametrize(
    ("bounds", "status", "why"),
    [
        ({"tasks": "t.b"}, 403, "the key is limited to tasks whose names begin with 't.b'"),
        ({"quotas": Quotas(priority=2)}, 403, "quota priority"),
        ({"quotas": Quotas(open_tasks=0)}, 429, "quota open_tasks"),
        ({"quotas": Quotas(queues=0)}, 429, "quota queues"),
    ],
    ids=["tasks", "priority", "open_tasks", "queues"],
)
def test_a_copied_task_is_checked_like_an_enqueue_over_http(
    house: House, bounds: dict[str, Any], status: int, why: str
) -> None:
    id, key = stored_task(house, priority=3), api_client.make_key(house.engine, Scope.OPERATE, "ada", **bounds)
    visitor = Visitor(house.app)
    visitor.log_in(key)
    before = changes(house)
    answer = visitor.post(f"/ui/tasks/{id}/again", args="[1]")
    assert (answer.status_code, form_of(answer.text)["args"]) == (status, "[1]")
    assert why in unescape(answer.text)
    assert changes(house) == before
    call = {"name": "t.a", "args": [1], "queue": "mail.out", "priority": 3}
    asked = house.send("POST", "/api/v1/tasks", key, json=call)
    assert asked.status_code == status
    assert why in asked.json()["detail"]


def test_a_copied_task_keeps_its_concurrency_key(house: House) -> None:
    id = stored_task(house, concurrency_key="ada")
    visitor = Visitor(house.app)
    visitor.get("/ui")
    sent = visitor.post(f"/ui/tasks/{id}/again", args="[]")
    new = sent.headers["Location"].rpartition("/")[2]
    assert rows(house, f"SELECT lane FROM orchestrator.tasks WHERE id = '{new}'") == [("|ada",)]


def test_runs_are_counted_before_they_are_cancelled(house: House) -> None:
    visitor = Visitor(house.app)
    assert "Cancel all open" not in visitor.get("/ui/runs").text, "nothing is said of which"
    listed = visitor.get("/ui/runs?workflow=mail-flow&span=1h").text
    assert "/ui/runs/cancel?workflow=mail-flow&amp;span=1h" in listed
    assert "Choose at least one filter" in visitor.get("/ui/runs/cancel").text
    page = visitor.get("/ui/runs/cancel?workflow=mail-flow&span=1h").text
    assert "Cancel 1 run<" in page
    ids = re.findall(r'type="hidden" name="id" value="([^"@]*)', page)
    assert ids == [str(house.runs["mail"])]
    visitor.post("/ui/runs/cancel-chosen", id=ids, back="/ui/runs")
    assert visitor.said() == "1 of 1 runs are being cancelled."
    assert rows(house, "SELECT kind, target FROM orchestrator.inbox") == [("cancel run", house.runs["mail"])]
    assert rows(house, "SELECT act, kind, target FROM orchestrator.audit") == [("cancel", "run", ids[0])]


def test_the_page_of_a_stuck_run_shows_the_difference_and_the_remedy(house: House) -> None:
    run = uuid4()
    reason = {"kind": "Misfit", "message": "it does not fit", "event": 2, "difference": "- sleep\n+ task <pear>"}
    with house.engine.connect() as connection:
        connection.exec_driver_sql(
            "INSERT INTO orchestrator.runs (id, name, status, total, open, workflow, code, stuck)"
            " VALUES (%s, 'pears', 'running', 1, 1, 'pears', true, %s)",
            (run.hex, json.dumps(reason)),
        )
        page = unescape(Visitor(house.app).get(f"/ui/runs/{run}").text)
        connection.exec_driver_sql("DELETE FROM orchestrator.runs WHERE id = %s", (run.hex,))
    assert "- sleep\n+ task <pear></pre>" in page
    assert "It resumes when a worker with matching code starts, or when you retry it." in page


def test_a_bulk_retry_applies_only_to_failed_and_stuck_runs(house: House) -> None:
    made = {name: uuid4() for name in ("failed", "code", "stuck", "good")}
    with house.engine.connect() as connection:
        for name, status, more in (
            ("failed", "failed", "false, NULL, now()"),
            ("code", "failed", "true, NULL, now()"),
            ("stuck", "running", 'true, \'{"kind": "K", "message": "m"}\', NULL'),
            ("good", "success", "false, NULL, now()"),
        ):
            connection.exec_driver_sql(
                "INSERT INTO orchestrator.runs (id, name, status, total, open, workflow, code, stuck, ended_at)"
                f" VALUES (%s, 'n', %s, 0, 0, 'nightly', {more})",
                (made[name].hex, status),
            )
    visitor = Visitor(house.app)
    try:
        page = visitor.get("/ui/runs/retry?workflow=nightly").text
        assert "Retry 2 runs<" in page
        assert "<strong>K</strong> m</small>" in visitor.get("/ui/runs?stuck=true").text, "a list says why"
        ids = re.findall(r'type="hidden" name="id" value="([^"@]*)', page)
        assert {*ids} == {str(made["failed"]), str(made["stuck"])}
        assert "Retry 1 run<" in visitor.get("/ui/runs/retry?workflow=nightly&stuck=true").text
        assert "No matching run is open" not in visitor.get("/ui/runs/cancel?workflow=nightly&status=running").text
        assert "No matching run is open." in visitor.get("/ui/runs/cancel?workflow=nightly&status=failed").text
        visitor.post("/ui/runs/retry-chosen", id=[str(id) for id in made.values()], back="/ui/runs")
        assert "2 of 4 runs are being retried; 2 skipped" in visitor.said()
        asked = rows(house, "SELECT target FROM orchestrator.inbox WHERE kind = 'retry run'")
        assert {target for (target,) in asked} == {made["failed"], made["stuck"]}
    finally:
        rows(house, "DELETE FROM orchestrator.runs WHERE workflow = 'nightly' RETURNING id")


def test_ended_runs_are_counted_before_they_are_deleted(house: House) -> None:
    made = {name: uuid4() for name in ("failed", "good", "child", "open")}
    with house.engine.connect() as connection:
        for name, status, ended in (
            ("failed", "failed", "now()"),
            ("good", "success", "now()"),
            ("open", "running", "NULL"),
        ):
            connection.exec_driver_sql(
                "INSERT INTO orchestrator.runs (id, name, status, total, open, success, workflow, ended_at)"
                f" VALUES (%s, 'n', %s, 7, 0, 7, 'nightly', {ended})",
                (made[name].hex, status),
            )
        connection.exec_driver_sql(
            "INSERT INTO orchestrator.runs (id, name, status, total, open, workflow, ended_at, parent_run)"
            " VALUES (%s, 'n', 'success', 0, 0, 'nightly', now(), %s)",
            (made["child"].hex, made["good"].hex),
        )
    visitor = Visitor(house.app)
    try:
        assert "Delete all ended" not in visitor.get("/ui/runs").text, "nothing is said of which"
        assert "/ui/runs/delete?workflow=nightly" in visitor.get("/ui/runs?workflow=nightly").text
        page = visitor.get("/ui/runs/delete?workflow=nightly").text
        assert "Delete 2 runs<" in page
        assert "Their 14 tasks, child runs, logs and results" in page
        assert "This cannot be undone" in page
        ids = re.findall(r'type="hidden" name="id" value="([^"@]*)', page)
        assert {*ids} == {str(made["failed"]), str(made["good"])}
        assert "Delete…" not in visitor.get(f"/ui/runs/{made['open']}").text
        assert "Delete…" not in visitor.get(f"/ui/runs/{made['child']}").text
        assert "Delete…" in visitor.get(f"/ui/runs/{made['good']}").text
        visitor.post("/ui/runs/delete-chosen", id=[str(id) for id in made.values()], back="/ui/runs")
        assert "2 of 4 runs are being deleted; 2 skipped" in visitor.said()
        asked = {run for (run,) in rows(house, "SELECT run_id FROM orchestrator.deletions")}
        assert asked == {made["failed"], made["good"]}
        written = rows(house, "SELECT act, kind, target FROM orchestrator.audit")
        assert {*written} == {("delete", "run", str(run)) for run in asked}
        listed = visitor.get("/ui/runs?workflow=nightly").text
        assert {name: f'data-key="{id}"' in listed for name, id in made.items()} == {
            "failed": False,
            "good": False,
            "child": True,
            "open": True,
        }
    finally:
        rows(house, "DELETE FROM orchestrator.runs WHERE workflow = 'nightly' RETURNING id")


def test_hundreds_of_runs_are_retried_by_a_few_statements(house: House) -> None:
    made = [uuid4() for _ in range(500)]
    with house.engine.connect() as connection:
        connection.exec_driver_sql(
            "INSERT INTO orchestrator.runs (id, name, status, total, open, workflow, ended_at)"
            " SELECT id, 'n', 'failed', 0, 0, 'many', now() FROM unnest(%s::uuid[]) AS id",
            ([id.hex for id in made],),
        )
    visitor = Visitor(house.app)
    visitor.get("/ui/runs")
    sent: list[str] = []
    event.listen(Engine, "before_cursor_execute", note := lambda *given: sent.append(given[2]))
    try:
        visitor.post("/ui/runs/retry-chosen", id=[str(id) for id in made], back="/ui/runs")
    finally:
        event.remove(Engine, "before_cursor_execute", note)
        rows(house, "DELETE FROM orchestrator.runs WHERE workflow = 'many' RETURNING id")
    assert visitor.said() == "500 of 500 runs are being retried."
    assert len(sent) < 20, sent
    assert rows(house, "SELECT count(*) FROM orchestrator.inbox WHERE kind = 'retry run'") == [(500,)]
    assert rows(house, "SELECT count(*) FROM orchestrator.audit WHERE act = 'retry' AND kind = 'run'") == [(500,)]


def test_marked_tasks_are_acted_on_by_a_few_statements(house: House) -> None:
    states = {"failed": 150, "skipped": 10, "cancelled": 10, "success": 10}
    made = {state: [uuid4() for _ in range(count)] for state, count in states.items()}
    made["keyed"] = [uuid4() for _ in range(2)]
    with house.engine.connect() as connection:
        for state, ids in made.items():
            key = ("'same'", '\'{"unique_for": "running"}\'') if state == "keyed" else ("NULL", "NULL")
            connection.exec_driver_sql(
                "INSERT INTO orchestrator.ended_tasks (id, name, queue, payload, status, attempt, failures, losses,"
                " priority, seq, created_at, ended_at, unique_key, options) SELECT id, 'many', 'marked', '', %s, 1, 0,"
                f" 0, 0, 1, now(), now(), {key[0]}, {key[1]} FROM unnest(%s::uuid[]) AS id",
                ("failed" if state == "keyed" else state, [id.hex for id in ids]),
            )
        connection.exec_driver_sql(
            "INSERT INTO orchestrator.tasks (id, name, queue, payload)"
            " SELECT gen_random_uuid(), 'many', 'marked', '' FROM generate_series(1, 150)"
        )
    visitor = Visitor(house.app)
    visitor.get("/ui/tasks")
    sent: list[str] = []
    event.listen(Engine, "before_cursor_execute", note := lambda *given: sent.append(given[2]))
    try:
        chosen = [str(id) for ids in made.values() for id in ids]
        visitor.post("/ui/tasks/retry-chosen", id=chosen, back="/ui/tasks")
        assert visitor.said().startswith("171 of 182 tasks are retried; 11 skipped"), "of one key, one is"
        assert len(sent) < 100, sent
        asked = {target for (target,) in rows(house, "SELECT target FROM orchestrator.inbox WHERE kind = 'retry task'")}
        assert len(asked & {*made["keyed"]}) == 1
        assert asked - {*made["keyed"]} == {*made["failed"], *made["skipped"], *made["cancelled"]}
        assert rows(house, "SELECT count(*) FROM orchestrator.audit WHERE act = 'retry' AND kind = 'task'") == [(171,)]
        sent.clear()
        opened = [str(id) for (id,) in rows(house, "SELECT id FROM orchestrator.tasks WHERE queue = 'marked'")]
        visitor.post("/ui/tasks/cancel-chosen", id=[*opened, chosen[0]], back="/ui/tasks")
        assert visitor.said().startswith("150 of 151 tasks are cancelled; 1 skipped")
        assert len(sent) < 20, sent
        assert rows(house, "SELECT count(*) FROM orchestrator.inbox WHERE kind = 'cancel task'") == [(150,)]
        assert rows(house, "SELECT count(*) FROM orchestrator.audit WHERE act = 'cancel' AND kind = 'task'") == [(150,)]
    finally:
        event.remove(Engine, "before_cursor_execute", note)
        for table in ("tasks", "ended_tasks"):
            rows(house, f"DELETE FROM orchestrator.{table} WHERE queue = 'marked' RETURNING id")


def test_a_bulk_action_with_a_forbidden_run_changes_nothing(house: House) -> None:
    bound = Visitor(house.app)
    bound.log_in(make_key(house, Scope.OPERATE, "mail.", "mail-"))
    page = bound.get("/ui/runs").text
    assert f'name="id" value="{house.runs["mail"]}" data-may="cancel" form="chosen"' in page
    before = changes(house)
    bound.post("/ui/runs/cancel-chosen", id=[str(house.runs["mail"]), str(house.runs["bank"])])
    assert "No run has the id" in bound.said()
    assert changes(house) == before, "none of them is cancelled"
    assert str(house.runs["bank"]) not in bound.get("/ui/runs/cancel?status=pending").text
    reader = Visitor(house.app)
    reader.log_in(make_key(house, Scope.READ))
    assert 'form="chosen"' not in reader.get("/ui/runs").text
    assert reader.get("/ui/runs/cancel?status=pending").status_code == 403


def groups_of(page: str) -> list[str]:
    return re.findall(r'<tr data-key="([^"]*)">', page)


MAIL, BANK = "t.a-mail.out-E#5fb066", "t.a-bank.out-E#f8e228"


def test_failure_groups_are_snoozed_acknowledged_and_opened_again(house: House) -> None:
    path = "/ui/failures/t.a/mail.out/E%235fb066"
    visitor = Visitor(house.app)
    visitor.get("/ui/failures")
    visitor.post(f"{path}/snooze", hours="24", back="/ui/failures")
    page = visitor.get("/ui/failures").text
    assert re.search(r'class="said.*snoozed until <time[^>]*>.* UTC</time>\. <button[^>]*>Undo', page)
    assert f'<form id="undo" method="post" action="{path}/reopen">' in page
    shown, _, folded = page.partition('<details data-key="snoozed">')
    assert (groups_of(shown), groups_of(folded)) == ([BANK], [MAIL])
    assert re.search(r"snoozed by .*, until <time[^>]*data-moment>20\d\d-.* UTC<", folded)
    assert "mail.out" not in visitor.get("/ui").text.partition("<h2>Failures")[2]
    visitor.post(f"{path}/reopen", back="/ui/failures")
    assert 'data-key="snoozed"' not in visitor.get("/ui/failures").text
    visitor.post(f"{path}/acknowledge", back="/ui/failures")
    page = visitor.get("/ui/failures").text
    assert groups_of(page) == [BANK, MAIL], "what somebody knows of comes last"
    assert "acknowledged by " in page
    overview = visitor.get("/ui").text.partition("<h2>Failures")[2]
    assert groups_of(overview) == [BANK, MAIL]
    group = "?status=failed&amp;name=t.a&amp;queue=mail.out&amp;kind=E%235fb066"
    assert f'{group}"><strong>E</strong> secret of mail' in overview
    assert overview.count('<span class="tag">acknowledged</span>') == 1
    lines = rows(house, "SELECT act, target FROM orchestrator.audit WHERE kind = 'failures' ORDER BY id")
    assert [act for act, _ in lines] == ["snooze", "reopen", "acknowledge"]
    assert {target for _, target in lines} == {"t.a E#5fb066 in mail.out"}
    rows(house, "UPDATE orchestrator.audit SET at = at - interval '1 day' WHERE kind = 'failures' RETURNING id")
    visitor.post("/ui/queues/mail.out/resume")  # clears the cache
    page = visitor.get("/ui/failures").text
    assert "acknowledged by " not in page, "it has failed since"
    assert re.search(r"failed again since \S.* acknowledged it <time", page)
    assert '<span class="tag">acknowledged</span>' not in visitor.get("/ui").text


def test_a_retry_without_a_scheduler_is_requested_once(house: House) -> None:
    visitor = Visitor(house.app)
    page = f"/ui/tasks/{house.failed['mail']}"
    assert f'action="{page}/retry"' in visitor.get(page).text
    for _ in range(2):
        visitor.post(f"{page}/retry", back=page)
        assert visitor.said() == "A retry is requested."
    assert rows(house, "SELECT kind, target FROM orchestrator.inbox") == [("retry task", house.failed["mail"])]
    shown = visitor.get(page).text
    assert "</i>retry requested</span>" in shown
    assert "The task is retried once a scheduler is running." in shown
    assert f'action="{page}/retry"' not in shown


@pytest.mark.parametrize("state", ["pending", "running"])
def test_a_cancel_without_a_scheduler_is_shown_as_requested(house: House, state: str) -> None:
    visitor = Visitor(house.app)
    page = f"/ui/tasks/{house.tasks['mail']}"
    with house.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE orchestrator.tasks SET status = '{state}' WHERE queue = 'mail.out'")
    before = visitor.get(page).text
    assert f'action="{page}/cancel"' in before
    assert "cancel requested" not in before
    visitor.post(f"{page}/cancel", back=page)
    for _ in range(2):  # also on a second read
        shown = visitor.get(page).text
        assert "</i>cancel requested</span>" in shown
        assert "The task is cancelled once a scheduler is running." in shown
        assert f'action="{page}/cancel"' not in shown
    assert "cancel requested" not in visitor.get(f"/ui/tasks/{house.tasks['bank']}").text, "another task"


def test_a_lost_worker_is_shown_as_lost_with_a_fixed_uptime(house: House) -> None:
    with house.engine.connect() as connection:
        empty(connection, "workers")
        make_worker(house, "web-1-aa", None)
        connection.exec_driver_sql(
            "UPDATE orchestrator.workers SET state = 'dead', started_at = now() - interval '50 minutes',"
            " seen_at = now() - interval '40 minutes'"
        )
    visitor = Visitor(house.app)
    for path in ("/ui/workers", "/ui/workers/web-1-aa"):
        page = visitor.get(path).text
        assert "</i>lost</span>" in page
        assert re.search(r"(ran |Ran</dt><dd>)10m", page), path
        assert "ptime" not in page


def test_without_a_scheduler_the_workers_of_a_queue_are_unknown(house: House) -> None:
    visitor = Visitor(house.app)
    for path in ("/ui", "/ui/queues", "/ui/queues/mail.out"):
        page = visitor.get(path).text
        assert "no worker" not in page, path
        assert "unknown" in page, path
    with leading(house):  # the cached status still has no leader
        eventually(lambda: "no worker serves it" in visitor.get("/ui/queues").text)


def test_a_snooze_ends(house: House) -> None:
    visitor = Visitor(house.app)
    visitor.get("/ui/failures")
    visitor.post("/ui/failures/t.a/mail.out/E%235fb066/snooze", hours="1", back="/ui/failures")
    rows(house, "UPDATE orchestrator.audit SET detail = jsonb_build_object('until', now()) RETURNING id")
    visitor.post("/ui/queues/mail.out/resume", back="/ui/failures")  # clears the cache
    assert groups_of(visitor.get("/ui/failures").text) == [BANK, MAIL]


def test_failure_groups_cannot_be_snoozed_without_permission(house: House) -> None:
    bound, reader = Visitor(house.app), Visitor(house.app)
    bound.log_in(make_key(house, Scope.OPERATE, "mail.", "mail-"))
    assert bound.post("/ui/failures/t.a/bank.out/E/snooze", hours="1").status_code == 403
    reader.log_in(make_key(house, Scope.READ))
    assert "Handle" not in reader.get("/ui/failures").text
    assert reader.post("/ui/failures/t.a/mail.out/E/snooze", hours="1").status_code == 403
    assert rows(house, "SELECT 1 FROM orchestrator.audit WHERE kind = 'failures'") == []


def test_failure_groups_are_sortable_and_show_when_and_where(house: House) -> None:
    with house.engine.connect() as connection:
        empty(connection, "workers")
        for name, minutes in (("mail", 40), ("bank", 5)):
            connection.exec_driver_sql(
                "UPDATE orchestrator.ended_tasks SET worker = %s, ended_at = now() - %s * interval '1 minute'"
                " WHERE id = %s",
                (f"{name}-1-aa", minutes, house.failed[name].hex),
            )
        make_worker(house, "web-1-aa", None)
        connection.exec_driver_sql(
            "UPDATE orchestrator.workers"
            " SET started_at = now() - interval '20 minutes', seen_at = now() - interval '1 minute'"
        )  # no scheduler leads
    visitor = Visitor(house.app)
    visitor.get("/ui")
    visitor.post("/ui/queues/mail.out/resume")  # clears the cache
    page = visitor.get("/ui/failures?sort=-last").text
    assert groups_of(page) == [BANK, MAIL]
    assert '<th class="number wide" aria-sort="descending"><a href="/ui/failures?sort=last">Last' in page
    assert groups_of(visitor.get("/ui/failures?sort=last").text) == [MAIL, BANK]
    assert visitor.get("/ui/failures?sort=error").status_code == 422
    bank, mail = (re.search(rf'<tr data-key="{key}">.*?</tr>', page, re.DOTALL)[0] for key in (BANK, MAIL))  # type: ignore[index]
    assert "new since the last worker start" in bank
    assert "new since" not in mail
    assert not re.search("rising|falling", page), "one failure is no trend"
    assert "on bank-1-aa" in bank
    assert ">40m" in mail


def test_a_group_that_failed_before_the_last_worker_start_is_not_new(house: House) -> None:
    """This also holds if that failure is outside the displayed range, or if its task was retried since."""
    visitor = Visitor(house.app)
    visitor.get("/ui")

    def new_groups(mail: str, bank: str, started: str) -> list[str]:
        with house.engine.connect() as connection:
            for name, ended in (("mail", mail), ("bank", bank)):
                connection.exec_driver_sql(
                    "UPDATE orchestrator.ended_tasks SET ended_at = now() - %s::interval WHERE id = %s",
                    (ended, house.failed[name].hex),
                )
            empty(connection, "workers")
            for worker, start in (("old-1-aa", "50m"), ("new-1-aa", started)):
                make_worker(house, worker, None)
                connection.exec_driver_sql(
                    "UPDATE orchestrator.workers SET started_at = now() - %s::interval WHERE id = %s", (start, worker)
                )
        visitor.post("/ui/queues/mail.out/resume")  # clears the cache
        page = visitor.get("/ui/failures?within=1h").text
        return re.findall(r'<tr data-key="([^"]*)">[^\n]*new since the last worker start', page)

    assert new_groups("40m", "5m", "20m") == [BANK], "the first of two workers is older than both"
    assert new_groups("40m", "5m", "45m") == [], "nothing had ended before the first workers, which start together"
    copy = (
        "INSERT INTO orchestrator.ended_tasks (id, name, queue, priority, seq, attempt, status, error, failures,"
        " losses, payload, created_at, ended_at) SELECT gen_random_uuid(), {}, queue, priority, seq, attempt, status,"
        " error, failures, losses, payload, created_at, now() - interval '3 hours' FROM orchestrator.ended_tasks"
        f" WHERE id = '{house.failed['bank']}' RETURNING id"
    )
    rows(house, copy.format("'t.other'"))
    assert {*new_groups("40m", "5m", "45m")} == {BANK, MAIL}
    rows(house, copy.format("name"))
    assert new_groups("30m", "5m", "45m") == [MAIL], "bank has failed three hours ago"
    with house.engine.connect() as connection:
        connection.exec_driver_sql(
            "INSERT INTO orchestrator.attempts (task_id, attempt, outcome, error, ended_at)"
            " SELECT id, 0, 'failed', error, now() - interval '2 hours' FROM orchestrator.ended_tasks WHERE id = %s",
            (house.failed["mail"].hex,),
        )
        try:
            assert new_groups("30m", "5m", "45m") == [], "mail was retried"
        finally:
            empty(connection, "attempts")
            connection.exec_driver_sql(
                "DELETE FROM orchestrator.ended_tasks WHERE ended_at < now() - interval '2 hours' AND status = 'failed'"
            )


@pytest.mark.parametrize(
    ("counts", "word"),
    [
        ([0] * 23 + [60], ""),
        ([0, 0, 5, 0, 0, 0, 0, 9], "rising"),
        ([9, 9, 9, 9, 1, 1, 5, 5], "rising"),
        ([1, 1, 1, 1, 1, 1, 1, 2], "steady"),
        ([0, 0, 0, 0, 9, 9, 1, 1], "falling"),
        ([5, 0, 0, 0, 0, 0, 0, 0], "stopped"),
    ],
)
def test_a_trend_compares_the_last_quarter_with_the_one_before(counts: list[int], word: str) -> None:
    assert words.trend(counts) == word


def found_in(page: str, heading: str) -> list[str]:
    _, _, section = page.partition(f"<h2>{heading}</h2>")
    return re.findall(r'<tr data-key="([^"]*)">', section.partition("</section>")[0])


def test_searching_for_a_short_id_redirects_to_its_page(house: House) -> None:
    visitor, bound = Visitor(house.app), Visitor(house.app)
    for id in (house.failed["bank"], house.tasks["bank"]):
        assert f">{str(id)[-8:]}<" in visitor.get("/ui/tasks").text
        found = visitor.get(f"/ui/search?text={str(id)[-8:]}")
        assert (found.status_code, found.headers["location"]) == (303, f"/ui/tasks/{id}")
    bound.log_in(make_key(house, Scope.READ, "mail.", "mail-"))
    assert str(id) not in bound.get(f"/ui/search?text={str(id)[-8:]}").text


WITH_THIS = "Tasks with this argument"


def test_search_finds_tasks_by_argument_values_except_redacted_ones(house: House) -> None:
    backend = Backend(house.settings)
    try:
        made = {
            queue: str(UUID(bytes=backend.tasks.enqueue(call_by_name(
                house.settings, "t.a", [{"order": [471100, "cust-7781"]}], {"password": "hunter2-cust"},
                options={"queue": queue, "redact": ["password"]}, queue="default",
            ))))
            for queue in ("mail.out", "bank.out")
        }  # fmt: skip
    finally:
        backend.close()
    visitor, bound = Visitor(house.app), Visitor(house.app)
    for text in ("cust-7781", "471100"):
        assert {*found_in(visitor.get(f"/ui/search?text={text}").text, WITH_THIS)} == {*made.values()}, text
    for text in ("hunter2-cust", "order", "47110"):
        assert found_in(visitor.get(f"/ui/search?text={text}").text, WITH_THIS) == [], text
    bound.log_in(make_key(house, Scope.READ, "mail.", "mail-"))
    assert found_in(bound.get("/ui/search?text=cust-7781").text, WITH_THIS) == [made["mail.out"]]


def test_runs_are_found_by_the_value_of_a_parameter(house: House) -> None:
    rows(
        house,
        'UPDATE orchestrator.runs SET params = \'{"day": "the 3\\"rd"}\' WHERE workflow = \'mail-flow\' RETURNING id',
    )
    page = Visitor(house.app).get("/ui/search", **{}).text
    assert "value of an argument" in page
    page = Visitor(house.app).get("/ui/search?text=3%22rd").text
    assert found_in(page, "Runs with this in a parameter") == [str(house.runs["mail"])]
    bound = Visitor(house.app)
    bound.log_in(make_key(house, Scope.READ, "bank.", "bank-"))
    assert found_in(bound.get("/ui/search?text=3%22rd").text, "Runs with this in a parameter") == []


def test_a_list_of_runs_that_stops_early_offers_the_next_page(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, wanted = (
        "The search stopped after one second. There may be more matches on the next page.",
        "/ui/runs?status=cancelled",
    )
    rare, *_ = made = sorted(UUID(bytes=new_id()) for _ in range(5))
    for id in made:
        state = "cancelled" if id == rare else "running"
        rows(
            house,
            "INSERT INTO orchestrator.runs (id, name, total, open, workflow, status)"
            f" VALUES ('{id}', 'n', 0, 0, 'stopping', '{state}') RETURNING id",
        )
    visitor = Visitor(house.app)
    try:
        page = visitor.get(wanted).text
        assert groups_of(page) == [str(rare)]
        assert stopped not in page
        monkeypatch.setattr(run_lists, "MAX_SCANNED", 2)
        monkeypatch.setattr(run_lists, "MAX_LIST_SECONDS", -1.0)
        page, seen = visitor.get(wanted).text, []
        assert stopped in page
        assert "No matches so far." in page
        while following := re.search(r'href="([^"]*)" rel="next"', page):
            page = visitor.get(unescape(following[1])).text
            seen += groups_of(page)
        assert seen == [str(rare)]
        assert stopped not in page, "the last page has looked at all of them"
    finally:
        rows(house, "DELETE FROM orchestrator.runs WHERE workflow = 'stopping' RETURNING id")


def test_lists_are_sorted_both_ways_across_pages(house: House) -> None:
    made = sorted(UUID(bytes=new_id()) for _ in range(120))
    with house.engine.connect() as connection:
        for id in made:
            connection.exec_driver_sql(
                "INSERT INTO orchestrator.ended_tasks (id, name, queue, payload, status, attempt, failures, losses,"
                " priority, seq, created_at, ended_at)"
                " VALUES (%s, 'many', 'turned', '', 'success', 1, 0, 0, 0, 1, now(), now())",
                (id.hex,),
            )
            connection.exec_driver_sql(
                "INSERT INTO orchestrator.runs (id, name, total, open, workflow, status, ended_at)"
                " VALUES (%s, 'n', 0, 0, 'turned', 'success', now())",
                (id.hex,),
            )
    visitor = Visitor(house.app)
    try:
        orders = [(path, by) for by in ("when", "ended") for path in ("/ui/tasks?queue", "/ui/runs?workflow")]
        for path, by, order in (
            (*one, order) for one in [*orders, ("/ui/runs?tag=&workflow", "workflow")] for order in ("", "-")
        ):
            link, seen = f"{path}=turned&sort={order}{by}", []
            while link:
                page = visitor.get(link).text
                assert f'aria-sort="{"descending" if order else "ascending"}"' in page
                seen += groups_of(page)
                found = re.search(r'href="([^"]*)" rel="next"[^>]*>(\w+)<', page)
                link = unescape(found[1]) if found else ""
            assert seen == sorted(map(str, made), reverse=bool(order)), path
    finally:
        rows(house, "DELETE FROM orchestrator.ended_tasks WHERE queue = 'turned' RETURNING id")
        rows(house, "DELETE FROM orchestrator.runs WHERE workflow = 'turned' RETURNING id")
    assert visitor.get("/ui/tasks?sort=name").status_code == 422


def test_lists_of_runs_have_the_first_line_of_the_error(house: House) -> None:
    run, code = uuid4(), uuid4()
    with house.engine.connect() as connection:
        for id, is_code in ((run, False), (code, True)):
            connection.exec_driver_sql(
                "INSERT INTO orchestrator.runs (id, name, status, total, open, workflow, code, ended_at)"
                " VALUES (%s, 'n', 'failed', 0, 0, 'broken-flow', %s, now())",
                (id.hex, is_code),
            )
        for id, of, status, text in (
            (uuid4(), run, "success", ""),
            (uuid4(), run, "failed", "first line\\nsecond line"),
            (code, None, "failed", "the code gave up"),
        ):
            connection.exec_driver_sql(
                "INSERT INTO orchestrator.ended_tasks (id, name, queue, payload, status, error, attempt, failures,"
                " losses, priority, seq, created_at, ended_at, run_id)"
                " VALUES (%s, 't', 'q', '', %s, %s, 1, 1, 0, 0, 1, now(), now(), %s)",
                (id.hex, status, f'{{"kind": "E", "message": "{text}"}}', of and of.hex),
            )
    try:
        page = Visitor(house.app).get("/ui/runs?workflow=broken-flow").text
    finally:
        rows(house, "DELETE FROM orchestrator.runs WHERE workflow = 'broken-flow' RETURNING id")
        rows(house, "DELETE FROM orchestrator.ended_tasks WHERE queue = 'q' RETURNING id")
    assert '<small class="why">E: first line</small>' in page
    assert '<small class="why">E: the code gave up</small>' in page
    assert "second line" not in page


def test_a_list_shows_the_error_of_a_late_task_of_a_large_run(house: House) -> None:
    run = uuid4()
    try:
        with house.engine.connect() as connection:
            connection.exec_driver_sql(
                "INSERT INTO orchestrator.runs (id, name, status, total, open, workflow, ended_at)"
                " VALUES (%s, 'n', 'failed', 0, 0, 'broken-flow', now() + interval '1 second')",
                (run.hex,),
            )
            connection.exec_driver_sql(
                "INSERT INTO orchestrator.ended_tasks (id, name, queue, payload, status, error, attempt, failures,"
                " losses, priority, seq, created_at, ended_at, run_id, step)"
                " SELECT gen_random_uuid(), 't', 'q', '', CASE WHEN n = 300 THEN 'failed' ELSE 'success' END,"
                """ CASE WHEN n = 300 THEN '{"kind": "E", "message": "the last one"}'::jsonb END,"""
                " 1, 1, 0, 0, 1, now(), now(), %s, 'part_' || to_char(n, 'FM000') FROM generate_series(1, 300) AS n",
                (run.hex,),
            )
        page = Visitor(house.app).get("/ui/runs?workflow=broken-flow").text
    finally:
        rows(house, "DELETE FROM orchestrator.runs WHERE workflow = 'broken-flow' RETURNING id")
        rows(house, "DELETE FROM orchestrator.ended_tasks WHERE queue = 'q' RETURNING id")
    assert '<small class="why">E: the last one</small>' in page


def test_charts_mark_starts_of_workers_and_changes_of_the_leader(house: House) -> None:
    with house.engine.connect() as connection:
        empty(connection, "workers", "throughput")
        begun = int((time.time() - 1_800) * 1_000)
        ids = (time_ordered_id(begun + 90_000 * place, bytes([place] * 10)) for place in range(2))
        parents = [str(UUID(bytes=id)) for id in ids]  # in different minutes, and still one start of the fleet
        for place, parent in enumerate((*parents, *parents)):  # each worker has replaced a process since
            make_worker(house, f"web-{place}-aa", parent)
        connection.exec_driver_sql("UPDATE orchestrator.workers SET started_at = now() - interval '5 minutes'")
        for term, minutes in ((1, 50), (1, 40), (2, 10), (2, 9)):
            connection.exec_driver_sql(
                "INSERT INTO orchestrator.throughput (bucket, queue, term, success, failed, cancelled, skipped,"
                " dispatched, retried, lost, waits, runs) VALUES (now() - %s * interval '1 minute', 'mail.out', %s,"
                " 1, 0, 7, 0, 0, 0, 0, '{}', '{}')",
                (minutes, term),
            )
    visitor, bound = Visitor(house.app), Visitor(house.app)
    visitor.get("/ui")
    visitor.post("/ui/queues/mail.out/resume")  # clears the cache
    try:
        for path in ("/ui", "/ui/queues/mail.out", "/ui/failures?within=1h", "/ui/workers/web-0-aa"):
            page = visitor.get(path).text
            marks = re.findall(
                r'<g class="mark (?:start|leader)"><title[^>]*>[^<]* UTC: ([^<]*)</title><line x1="([\d.]+)"', page
            )
            assert [text for text, _ in marks] == ["2 workers started", "another scheduler leads, in term 2"], path
            parts = 24 if "failures" in path else 60
            places = [int(x) for _, x in marks]  # at the start of a bar: later failures are to the right
            assert places == pytest.approx([parts / 2, parts * 5 / 6], abs=1.1), path
            (started,) = re.findall(r'workers started, <time datetime="([^"]*)"', page)
            assert datetime.fromisoformat(started).timestamp() == pytest.approx(begun / 1_000, abs=1), path
        assert 'aria-label="Failures in the last 7d"' in visitor.get("/ui/failures?within=7d").text
        rows(
            house,
            "INSERT INTO orchestrator.worker_releases (worker, release, started_at, until) SELECT id, '2026.2',"
            " now() - interval '29 minutes', now() + interval '1 day' FROM orchestrator.workers RETURNING worker",
        )
        visitor.post("/ui/queues/mail.out/resume")
        page = visitor.get("/ui").text
        marks = re.findall(r'<g class="mark (\w+)"><title[^>]*>[^<]* UTC: ([^<]*)</title>', page)
        assert marks == [("release", "release 2026.2 deployed"), ("leader", "another scheduler leads, in term 2")]
        legend = re.findall(r'<i class="mark (\w+)"></i>([^<]*), <time', page)
        assert legend == marks, "each line is named, and looks like itself"
        assert ">28 cancelled<" in visitor.get("/ui/queues/mail.out").text
        bound.log_in(make_key(house, Scope.READ, "mail.", "mail-"))
        assert 'class="mark ' not in bound.get("/ui").text
    finally:
        with house.engine.connect() as connection:
            empty(connection, "throughput", "worker_releases")


def test_failures_are_shown_for_a_chosen_time_range(house: House) -> None:
    visitor = Visitor(house.app)
    [(name, at)] = rows(
        house, f"SELECT name, ended_at FROM orchestrator.ended_tasks WHERE id = '{house.failed['mail']}'"
    )

    def shown(since: datetime, until: datetime | None = None) -> str:
        wanted = {"since": f"{since:%Y-%m-%dT%H:%M}"} | ({"until": f"{until:%Y-%m-%dT%H:%M}"} if until else {})
        return unescape(visitor.get(f"/ui/failures?{urlencode(wanted)}").text)

    minute = timedelta(minutes=1)
    assert f">{name}</a>" in shown(at - minute, at + minute)
    assert f">{name}</a>" in shown(at - 2 * minute)
    before = shown(at - 9 * minute, at - minute)
    assert f">{name}</a>" not in before
    assert f"Nothing has failed from {at - 9 * minute:%Y-%m-%d %H:%M} to" in before
    assert visitor.get("/ui/failures?since=2026-02-01T00:00&until=2026-01-01T00:00").status_code == 422
