"""The dashboard over HTTP: every page renders, escapes its data, and checks the scope of the API key."""

from __future__ import annotations

import html
import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, event

from orchestrator import Orchestrator
from orchestrator.api import access
from orchestrator.api.app import create_app
from orchestrator.api.dashboard.paths import PAGES
from orchestrator.api.dashboard.rendering import Action
from orchestrator.api.endpoints import Endpoint
from orchestrator.api.key_scope import BACKFILL, QUEUE, RUN, TASK, WORKFLOW, Subject
from orchestrator.domain.access import Scope, Secret
from orchestrator.errors import InvalidWorkflow
from orchestrator.sdk.backend import Backend, schedules
from orchestrator.sdk.ids import new_id
from orchestrator.store import keys
from orchestrator.store.tasks import redrive
from tests.emptying import empty
from tests.integration import api_client
from tests.integration.api_house import House, changes, furnished
from tests.integration.visitor import SESSION, Visitor
from tests.integration.waiting_house import flow_that_asks
from tests.waiting import eventually

HOSTILE = """"><script>alert('x')</script>{{ 7 * 7 }}"""
SHOWN = [one for one in PAGES if one.method == "GET" and not one.is_live and "static" not in one.path]
OPEN = [one for one in SHOWN if one.scope is None]
GUARDED = [one for one in PAGES if one.scope is not None]


@pytest.fixture(scope="module")
def furniture(database_url: str, redis_url: str) -> Iterator[House]:
    with furnished(database_url, redis_url) as found:
        flow_that_asks(found, "mail")
        yield found


@pytest.fixture
def house(furniture: House, monkeypatch: pytest.MonkeyPatch) -> House:
    """The furnished system, with only the API keys that a test creates."""
    monkeypatch.setattr(access, "_KEY_TTL", 0.0)
    monkeypatch.setattr(access, "_MAX_WRONG_KEYS", 10_000)
    with furniture.engine.connect() as connection:
        empty(connection, "api_keys", "inbox")
    return furniture


@pytest.fixture
def anyone(house: House) -> Visitor:
    """A visitor on this machine, while no API keys exist."""
    return Visitor(house.app)


def make_key(house: House, scope: Scope, queues: str | None = None, workflows: str | None = None) -> Secret:
    return api_client.make_key(house.engine, scope, "ada", queues=queues, workflows=workflows)


def address(endpoint: Endpoint, house: House, name: str = "mail") -> str:
    """Return the page's address with ids of existing objects."""
    kinds: dict[Subject, dict[str, Any]] = {
        QUEUE: {"name": f"{name}.out"},
        WORKFLOW: {"name": f"{name}-flow", "workflow": f"{name}-flow"},
        TASK: {"id": house.tasks[name]},
        RUN: {"id": house.runs[name], "name": "a"},
        BACKFILL: {"number": house.backfills[name]},
    }
    found = kinds.get(endpoint.about, {})
    path = endpoint.path.replace("{workflow}/{name}", "{workflow}/default").replace(
        "/flows/{name}", f"/flows/{name}-asks"
    )
    return re.sub(r"{(\w+)}", lambda place: str(found.get(place[1], "x")), path)


def titled(endpoint: Endpoint) -> str:
    return f"{endpoint.method} {endpoint.path}"


@pytest.mark.parametrize("endpoint", SHOWN, ids=titled)
def test_every_page_renders_without_inline_scripts_or_styles(house: House, anyone: Visitor, endpoint: Endpoint) -> None:
    answer = anyone.get(address(endpoint, house))
    is_there = not re.search("{anything}|{worker}", endpoint.path)  # no worker runs here
    assert answer.status_code == (200 if is_there else 404), answer.text
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "no-store" in answer.headers["Cache-Control"]
    assert not re.search(r"<style|style=|<script>|\son\w+=|javascript:", answer.text)
    assert not re.search(r"""(src|href|action)=["']?(https?:)?//""", answer.text)


@pytest.mark.parametrize("endpoint", SHOWN, ids=titled)
def test_invalid_queries_never_cause_a_server_error(house: House, anyone: Visitor, endpoint: Endpoint) -> None:
    for query in (
        "cursor=x",
        "status=nothing",
        "text=%00",
        "name=%00&queue=%ff",
        "since=yesterday",
        "a=1&a=2",
        "limit=0",
    ):
        answer = anyone.get(f"{address(endpoint, house)}?{query}")
        assert answer.status_code < 500, (query, answer.text)
        assert answer.headers["Content-Type"].startswith("text/html")
    for word in ("%00", "..%2f..%2fetc", "x" * 3_000, "%E2%82"):
        answer = anyone.get(re.sub(r"{\w+}", word, endpoint.path))
        assert answer.status_code < 500, (word, answer.text)


def test_hostile_names_are_escaped_in_pages(house: House, anyone: Visitor) -> None:
    task = UUID(bytes=new_id())
    with house.engine.connect() as connection:
        connection.exec_driver_sql(
            "INSERT INTO orchestrator.ended_tasks (id, name, queue, payload, status, reason, error, attempt, failures,"
            " losses, priority, seq, created_at, started_at, ended_at) VALUES (%s, %s, %s, '', 'failed', %s,"
            " jsonb_build_object('kind', %s::text, 'message', %s::text, 'traceback', %s::text), 1, 1, 0, 0, 1, now(),"
            " now(), now())",
            (task.hex, *[HOSTILE] * 6),
        )
    paths = (
        "/ui",
        "/ui/tasks",
        "/ui/failures",
        f"/ui/tasks/{task}",
        "/ui/tasks?status=failed",
        "/ui/queues",
        "/ui/search",
    )
    pages = [anyone.get(path).text for path in paths]
    for path, name in (("/ui/tasks", "name"), ("/ui/search", "text"), ("/ui/tasks/retry", "name")):
        pages.append(anyone.get(f"{path}?{urlencode({name: HOSTILE})}").text)
    with house.engine.connect() as connection:
        connection.exec_driver_sql("DELETE FROM orchestrator.ended_tasks WHERE id = %s", (task.hex,))
    for text in pages:
        assert "<script>alert" not in text
        assert "49" not in re.findall(r"&lt;/script&gt;(.{2})", text)
    assert sum("&lt;script&gt;" in text for text in pages) >= 6


def test_without_api_keys_no_login_is_needed(anyone: Visitor) -> None:
    assert anyone.get("/ui").status_code == 200
    assert "Log out" not in anyone.get("/ui").text
    assert anyone.get("/").headers["Location"] == "ui"


def test_once_a_key_exists_every_page_requires_a_login(house: House) -> None:
    make_key(house, Scope.ADMIN)
    for endpoint in GUARDED:
        visitor = Visitor(house.app)
        visitor.get("/ui/login")
        path = address(endpoint, house)
        before = changes(house)
        answer = visitor.get(path) if endpoint.method == "GET" else visitor.post(path)
        if endpoint.is_live:
            assert answer.status_code == 401, path
        else:
            assert (answer.status_code, answer.headers["Location"][:9]) == (303, "/ui/login"), path
        assert changes(house) == before


def test_a_key_grants_access_until_it_is_revoked(house: House) -> None:
    key = make_key(house, Scope.READ)
    visitor = Visitor(house.app)
    assert visitor.get("/ui/tasks?status=failed").headers["Location"] == "/ui/login?to=%2Fui%2Ftasks%3Fstatus%3Dfailed"
    wrong = visitor.log_in(Secret(key.id, secrets.token_urlsafe(32)))
    assert wrong.status_code == 401
    assert "no such key" in wrong.text
    assert visitor.log_in(key).headers["Location"] == "/ui"
    assert re.search(r"HttpOnly; Path=/ui; SameSite=lax$", visitor.set[SESSION])
    page = visitor.get("/ui")
    assert page.status_code == 200
    assert str(key) not in page.text
    assert visitor._send("GET", "/api/v1/tasks", {}).status_code == 401, "the API takes no cookies"
    with house.engine.connect() as connection:
        keys.revoke(connection, key.id)
    assert visitor.get("/ui").status_code == 303


def test_behind_a_proxy_all_links_start_with_its_prefix(house: House) -> None:
    """A trusted proxy strips the prefix and sends it in a header, which is ignored from other clients."""
    app = create_app(replace(house.settings, api_proxies="127.0.0.1"))
    key = make_key(house, Scope.ADMIN)
    told = {"X-Forwarded-Prefix": "/jobs", "X-Forwarded-For": "203.0.113.9"}
    visitor = Visitor(app, headers=told)
    assert visitor.get("/ui/tasks?name=a").headers["Location"] == "/jobs/ui/login?to=%2Fui%2Ftasks%3Fname%3Da"
    visitor.get("/ui/login")
    assert visitor.post("/ui/login", key=str(key), to="/ui/tasks").headers["Location"] == "/jobs/ui/tasks"
    assert "; Path=/jobs/ui;" in visitor.set[SESSION]
    for path in (
        "/ui",
        "/ui/tasks",
        "/ui/schedules",
        f"/ui/runs/{house.runs['mail']}",
        f"/ui/runs/{house.runs['mail']}/log",
        "/ui/no/such/page",
    ):
        page = visitor.get(path).text
        addresses = re.findall(r'(?:href|src|action|data-live|data-after)="([^"]*)"', page)
        assert len(addresses) > 20
        assert {address for address in addresses if not address.startswith("/jobs/ui")} == {"#content"}, path
        assert 'name="back" value="/jobs' not in page, "what forms send is what the server knows"
    paused = visitor.post("/ui/queues/mail.out/pause", back="/ui/queues")
    assert paused.headers["Location"] == "/jobs/ui/queues"
    assert "; Path=/jobs/ui/queues;" in visitor.set["orchestrator_said"], "other tabs show other pages"
    assert "paused" in visitor.said()
    visitor.post("/ui/queues/mail.out/resume")
    assert visitor.get(f"/ui/search?text={house.tasks['mail']}").headers["Location"].startswith("/jobs/ui/tasks/")
    sent = {"Origin": "http://localhost", "Referer": "http://localhost/jobs/ui/queues", **told}
    stranger = Visitor(app, headers=told)
    asked = stranger.post("/ui/queues/mail.out/pause", headers=sent)
    assert asked.headers["Location"] == "/jobs/ui/login?to=%2Fui%2Fqueues"
    assert visitor.post("/ui/logout").headers["Location"] == "/jobs/ui/login"
    assert "; Path=/jobs/ui;" in visitor.set[SESSION]
    assert Visitor(house.app, headers=told).get("/ui").headers["Location"] == "/ui/login"


def test_the_page_of_a_run_shows_its_origin(house: House, anyone: Visitor) -> None:
    run, task, other = house.runs["mail"], house.failed["mail"], house.runs["bank"]
    path = f"/ui/runs/{run}"

    def page(**columns: object) -> str:
        changed = ", ".join(f"{name} = %s" for name in columns)
        with house.engine.connect() as connection:
            connection.exec_driver_sql(
                f"UPDATE orchestrator.runs SET {changed} WHERE id = %s", (*columns.values(), run.hex)
            )
        return anyone.get(path).text

    assert "Started by" not in page(parent_task=None)
    assert f'Started by</dt><dd><a href="/ui/tasks/{task}">t.a</a>' in page(parent_task=task.hex)
    forgotten = page(parent_task=UUID(int=7).hex)
    assert "no longer kept" in forgotten
    assert f"/ui/tasks/{UUID(int=7)}" not in forgotten
    assert f'<a href="/ui/runs/{other}">run ' in page(parent_task=None, parent_run=other.hex, parent_step="load")
    scheduled = page(parent_run=None, parent_step=None, schedule="mail-flow/default")
    assert '<a href="/ui/schedules#mail-flow/default">schedule mail-flow/default</a>' in scheduled
    assert 'id="mail-flow/default"' in anyone.get("/ui/schedules").text, "the address leads to a row of it"
    filled = page(schedule="mail-flow/default#12")
    assert '<a href="/ui/schedules#mail-flow/default">backfill 12</a>' in filled
    page(schedule=None, parent_task=house.tasks["bank"].hex)
    bound = Visitor(house.app)
    bound.log_in(make_key(house, Scope.READ, "mail.", "mail-"))
    assert "Started by" not in bound.get(path).text, "it is started by a task of others"
    page(parent_task=None)


def test_lists_show_keys_parameters_fire_times_and_errors(house: House, anyone: Visitor) -> None:
    run, failed = house.runs["mail"], house.failed["mail"]
    restore = "UPDATE orchestrator.runs SET key = NULL, params = %s, schedule = NULL, fire_time = NULL WHERE id = %s"
    change = """UPDATE orchestrator.runs SET key = 'order-77', params = '{"region": "eu"}',
                schedule = 'mail-flow/default', fire_time = '2026-03-01T02:00Z' WHERE id = %s"""
    with house.engine.connect() as connection:
        before = connection.exec_driver_sql("SELECT params::text FROM orchestrator.runs WHERE id = %s", (run.hex,))
        params = before.scalar_one()
        connection.exec_driver_sql(change, (run.hex,))
        try:
            text = anyone.get("/ui/runs").text
            for told in (">order-77<", "region=&#34;eu&#34;", "2026-03-01 02:00", "schedule mail-flow/default", "v1"):
                assert told in text, told
            assert f"/ui/runs/{run}" in anyone.get("/ui/search?text=order-77").text
            own = "UPDATE orchestrator.runs SET key = 'schedule mail-flow/default 2026-03-01T02:00Z' WHERE id = %s"
            connection.exec_driver_sql(own, (run.hex,))
            assert "T02:00Z" not in anyone.get("/ui/runs").text, "the schedule and the time say the same"
            hidden = Visitor(create_app(replace(house.settings, redact="secret")))
            assert "parameters region" in hidden.get("/ui/runs").text, "values may be copies of secrets"
        finally:
            connection.exec_driver_sql(restore, (params, run.hex))
        error = connection.exec_driver_sql(
            "SELECT error->>'message' FROM orchestrator.ended_tasks WHERE id = %s", (failed.hex,)
        ).scalar_one()
    assert error
    assert error in anyone.get("/ui/tasks?status=failed").text
    assert f"/ui/tasks/{failed}" in anyone.get("/ui/tasks?status=failed&span=1h").text
    assert f"/ui/tasks/{failed}" not in anyone.get("/ui/tasks?since=2999-01-01T00:00").text
    assert f"/ui/runs/{run}" in anyone.get("/ui/runs?span=7d").text
    assert f"/ui/runs/{run}" not in anyone.get("/ui/runs?until=2020-01-01T00:00").text


def test_the_page_of_a_very_large_run_is_small(house: House, anyone: Visitor, tmp_path: Path) -> None:
    parts = {f"part_{number}": {"task": "t.a", "depends_on": ["first"]} for number in range(2_000)}
    body = {"name": "broad", "tasks": {"first": {"task": "t.a"}, **parts}}
    written = tmp_path / "broad.json"
    written.write_text(json.dumps(body))
    with Orchestrator(house.settings) as app:
        app.workflows.apply(written)
        run = app.workflows["broad"].start()
    try:
        for path in (f"/ui/runs/{run.id}", f"/ui/runs/{run.id}?open=part+%282000%29", "/ui/workflows/broad"):
            answer = anyone.get(path)
            assert answer.status_code == 200
            shown = answer.text.partition('<details data-key="definition"')[0]
            assert len(shown) < 300_000, path
        assert anyone.get(f"/ui/runs/{run.id}?step=nothing").status_code == 404
        listed = {state: anyone.get(f"/ui/runs/{run.id}?state={state}").text for state in ("waiting", "skipped")}
        counts = {state: len(re.findall(r'<tr data-key="step-', text)) for state, text in listed.items()}
        assert counts == {"waiting": 25, "skipped": 0}
        assert "2,001 waiting" in listed["skipped"]
    finally:
        with house.engine.connect() as connection:
            connection.exec_driver_sql("DELETE FROM orchestrator.runs WHERE id = %s", (run.id,))


def test_a_composition_is_shown_by_the_name_of_its_run(house: House, anyone: Visitor) -> None:
    with Orchestrator(house.settings) as app:
        task = app.task(name="t.a")(lambda one=1: one)
        run = (task.s() | task.s()).start(name="order-42")
    try:
        for path in ("/ui/runs", f"/ui/runs/{run.id}"):
            text = anyone.get(path).text
            assert "order-42" in text
            assert "composed:" not in text
    finally:
        with house.engine.connect() as connection:
            connection.exec_driver_sql("DELETE FROM orchestrator.runs WHERE id = %s", (run.id,))


def test_the_workflow_list_links_to_runs_of_older_versions(house: House, anyone: Visitor) -> None:
    runs = {version: uuid4() for version in (1, 2)}
    with house.engine.connect() as connection:
        for version, run in runs.items():
            connection.exec_driver_sql(
                "INSERT INTO orchestrator.runs (id, name, status, total, open, workflow, version, code) "
                "VALUES (%s, 'drained', 'running', 0, 0, 'drained', %s, true)",
                (str(run), version),
            )
    try:
        (found,) = re.findall(r'version 1 draining: <a href="([^"]+)">1 run</a>', anyone.get("/ui/workflows").text)
        page = anyone.get(html.unescape(found)).text
        assert (str(runs[1]) in page, str(runs[2]) in page) == (True, False)
        assert '<input type="hidden" name="version" value="1">' in page, "for another filter beside it"
    finally:
        with house.engine.connect() as connection:
            connection.exec_driver_sql("DELETE FROM orchestrator.runs WHERE workflow = 'drained'")


def test_last_runs_of_all_schedules_are_read_in_one_query(house: House) -> None:
    asked: list[str] = []
    visitor = Visitor(create_app(house.settings))  # a new server, with an empty cache

    def note(*arguments: Any) -> None:
        asked.append(arguments[2])

    event.listen(Engine, "before_cursor_execute", note)
    try:
        pages = [visitor.get(path).text for path in ("/ui/schedules", "/ui/workflows", "/ui/flows")]
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert sum("insights.last_runs" in statement for statement in asked) == 3
    assert not [statement for statement in asked if "insights.runs.list" in statement]
    for page in pages[:2]:
        assert f'<a class="square s-pending" href="/ui/runs/{house.runs["mail"]}"' in page
        assert f'<a class="square s-pending" href="/ui/runs/{house.runs["bank"]}"' in page


def test_logging_out_ends_the_session(house: House) -> None:
    visitor = Visitor(house.app)
    visitor.log_in(make_key(house, Scope.READ))
    assert visitor.get("/ui").status_code == 200
    visitor.post("/ui/logout")
    assert visitor.get("/ui").status_code == 303


def test_the_cookie_is_secure_only_over_tls(house: House) -> None:
    key = make_key(house, Scope.READ)
    for scheme, is_secure in (("http", False), ("https", True)):
        visitor = Visitor(house.app, scheme)
        visitor.log_in(key)
        assert ("Secure" in visitor.set[SESSION]) is is_secure


@pytest.mark.parametrize(
    "to", ["https://evil.example/ui", "//evil.example/ui", "/ui/../x", "/\\evil", "javascript:x", ""]
)
def test_a_login_never_redirects_to_another_site(house: House, to: str) -> None:
    visitor = Visitor(house.app)
    key = make_key(house, Scope.READ)
    visitor.get("/ui/login")
    found = visitor.post("/ui/login", key=str(key), to=to).headers["Location"]
    assert found == "/ui" or found == "/ui/../x"


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost"},
    ],
)
def test_cross_site_forms_are_rejected(house: House, headers: dict[str, str]) -> None:
    visitor = Visitor(house.app)
    visitor.log_in(make_key(house, Scope.ADMIN))
    before = changes(house)
    assert visitor.post("/ui/queues/mail.out/pause", headers=headers).status_code == 403
    assert visitor.post("/ui/queues/mail.out/pause", headers={"Origin": "http://evil.example"}).status_code == 403
    assert visitor.post("/ui/queues/mail.out/pause", token="").status_code == 403
    assert visitor.post("/ui/queues/mail.out/pause", token="x" * 32).status_code == 403
    assert changes(house) == before


def test_actions_without_their_scope_are_hidden_and_rejected(house: House) -> None:
    reader = Visitor(house.app)
    reader.log_in(make_key(house, Scope.READ))
    before = changes(house)
    for endpoint in PAGES:
        if isinstance(endpoint, Action) and endpoint.scope not in (None, Scope.READ):
            assert reader.post(address(endpoint, house)).status_code == 403, endpoint.path
    assert changes(house) == before
    paths = ["/ui", "/ui/queues", "/ui/queues/mail.out", "/ui/tasks", f"/ui/tasks/{house.tasks['mail']}"]
    paths += [f"/ui/runs/{house.runs['mail']}", "/ui/schedules", "/ui/failures", "/ui/workflows/mail-flow"]
    for path in paths:
        forms = re.findall(r'<form method="post" action="([^"]*)"', reader.get(path).text)
        assert [one for one in forms if one != "/ui/logout"] == [], path
    assert reader.get("/ui/audit").status_code == 403
    assert "/ui/audit" not in reader.get("/ui").text


def test_tasks_waiting_on_dependencies_are_not_counted_as_delayed(house: House, anyone: Visitor) -> None:
    add = "INSERT INTO orchestrator.tasks (id, name, queue, payload, blockers) VALUES (%s, 't.a', 'mail.waits', '', 2)"
    task = new_id().hex()
    with house.engine.connect() as connection:
        connection.exec_driver_sql(add, (task,))
    try:
        eventually(lambda: "1 waiting on dependencies" in anyone.get("/ui/queues").text, "it is told apart")
        [row] = re.findall(r'<tr data-key="mail.waits">.*?</tr>', anyone.get("/ui/queues").text, re.DOTALL)
        assert re.findall(r'<td class="number[^"]*">(\w+)</td>', row) == ["0", "0", "0", "unknown"], row
    finally:
        with house.engine.connect() as connection:
            connection.exec_driver_sql("DELETE FROM orchestrator.tasks WHERE id = %s", (task,))


def test_the_pulse_route_reports_outages_and_troubles(house: House, anyone: Visitor) -> None:
    def pulse_matches_the_overview() -> bool:
        return f'data-troubles="{anyone.get("/ui/pulse").json()["troubles"]}"' in anyone.get("/ui").text

    eventually(pulse_matches_the_overview, "the overview has the troubles that are told")
    assert anyone.get("/ui/pulse").json()["outage"] == "no scheduler leads"
    bound = Visitor(house.app)
    bound.log_in(make_key(house, Scope.OPERATE, "mail.", "mail-"))
    assert bound.get("/ui/pulse").json() == {"outage": "no scheduler leads", "troubles": "", "message": ""}


def test_every_page_explains_an_outage_and_its_remedy(house: House, anyone: Visitor) -> None:
    pages = ("/ui", "/ui/tasks", "/ui/queues", "/ui/workers", "/ui/runs", f"/ui/tasks/{house.tasks['mail']}")
    for path in pages:
        shown = anyone.get(path).text
        assert shown.count("No scheduler leads, so no task starts. Start one: orchestrator scheduler") == 1, path
        assert "All is well" not in shown
    with house.engine.connect() as connection:
        connection.exec_driver_sql(
            """INSERT INTO orchestrator.leases
                      (shard, owner, term, expires_at, address, useful_at, useful_term, trouble)
               VALUES (0, gen_random_uuid(), 1, now() + interval '1 hour', 'host:1', now() - interval '1 minute', 1,
                       'its disk is full')"""
        )
    try:
        eventually(lambda: anyone.get("/ui/pulse").json()["outage"] == "the scheduler cannot work", "it is looked at")
        message = anyone.get("/ui/pulse").json()["message"]
        assert re.match(r"The scheduler host:1 leads, but has done no work for 1m( \d+s)?: its disk is full\.", message)
        for path in pages:
            assert anyone.get(path).text.count("its disk is full. A healthy standby would have taken over") == 1, path
    finally:
        with house.engine.connect() as connection:
            connection.exec_driver_sql("DELETE FROM orchestrator.leases")
    bound = Visitor(house.app)
    bound.log_in(make_key(house, Scope.OPERATE, "mail.", "mail-"))
    assert "Nothing new starts: the scheduler cannot work." in bound.get("/ui/queues").text


def test_a_restricted_key_sees_only_its_queues_and_workflows(house: House) -> None:
    visitor = Visitor(house.app)
    visitor.log_in(make_key(house, Scope.OPERATE, "mail.", "mail-"))
    for path in ("/ui", "/ui/queues", "/ui/tasks", "/ui/runs", "/ui/failures", "/ui/workflows", "/ui/schedules"):
        answer = visitor.get(path)
        assert answer.status_code == 200, path
        assert "bank" not in answer.text, path
    refused = ("/ui/queues/bank.out", "/ui/workflows/bank-flow", "/ui/workers", f"/ui/tasks/{house.tasks['bank']}")
    for path in (*refused, f"/ui/runs/{house.runs['bank']}"):
        assert visitor.get(path).status_code in (403, 404), path
    chosen = visitor.post("/ui/tasks/cancel-chosen", id=[str(house.tasks["bank"])])
    assert chosen.headers["Location"].startswith("/ui")
    with house.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM orchestrator.inbox").scalar_one() == 0


def test_forms_perform_their_action_and_confirm_it_once(house: House, anyone: Visitor) -> None:
    anyone.get("/ui")
    answer = anyone.post("/ui/queues/mail.out/pause", back="/ui/queues")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/ui/queues")
    assert "paused" in anyone.said()
    assert anyone.said() == "", "it is said once"
    assert "paused" in anyone.get("/ui/queues/mail.out").text
    anyone.post("/ui/queues/mail.out/resume")
    anyone.post("/ui/queues/mail.out/limits", concurrency="7", rate="100/minute")
    assert 'value="7"' in anyone.get("/ui/queues/mail.out").text
    anyone.post("/ui/queues/mail.out/limits", concurrency="many", back="/ui/queues/mail.out")
    assert "Concurrency: give a whole number" in anyone.said()
    anyone.post("/ui/queues/mail.out/limits", concurrency="5")
    with house.engine.connect() as connection:
        acts = (
            connection.exec_driver_sql("SELECT act FROM orchestrator.audit WHERE target = 'mail.out'").scalars().all()
        )
    assert {"pause", "resume"} <= {*acts}


def test_a_form_returns_to_a_page_with_a_slash_in_its_name(house: House, anyone: Visitor) -> None:
    here = "/ui/queues/mail.%C3%BC%2Fx"
    backend = Backend(house.settings)
    backend.queues.limit("mail.ü/x", 5, None)
    backend.close()
    eventually(lambda: anyone.get(here).status_code == 200, "its limit is known")
    found = re.search(r'name="back" value="([^"]*)"', anyone.get(here).text)
    assert found is not None
    assert found[1] == here
    assert anyone.post("/ui/queues/mail.%C3%BC%2Fx/pause", back=found[1]).headers["Location"] == here
    make_key(house, Scope.READ)
    assert Visitor(house.app).get(here).headers["Location"] == f"/ui/login?to={quote(here, safe='')}"


def test_the_page_of_an_unknown_queue_is_not_found(house: House, anyone: Visitor) -> None:
    unknown = anyone.get("/ui/queues/mial.out")
    assert unknown.status_code == 404
    assert "There is no queue" in unknown.text
    assert "Did you mean &#39;mail.out&#39;?" in unknown.text
    assert "Dispatched" not in unknown.text
    assert anyone.get("/ui/queues/mail.out").status_code == 200
    assert anyone.get("/ui/queues/mail.later").status_code == 404
    backend = Backend(house.settings)
    backend.queues.pause("mail.later", True)
    backend.close()
    with house.engine.connect() as connection:
        connection.exec_driver_sql("DELETE FROM orchestrator.audit WHERE target = 'mail.later'")
    eventually(lambda: anyone.get("/ui/queues/mail.later").status_code == 200, "it has a setting now")
    ended = "INSERT INTO orchestrator.ended_tasks (id, name, queue, payload, status, attempt, failures, losses,"
    ended += " priority, seq, created_at, ended_at) VALUES (%s, 't.a', 'mail.once', '', 'success', 1, 0, 0, 0, 1,"
    with house.engine.connect() as connection:
        connection.exec_driver_sql(f"{ended} now(), now() - interval '2 hours')", (UUID(bytes=new_id()).hex,))
    assert anyone.get("/ui/queues/mail.once").status_code == 200, "tasks have ended in it"


@pytest.mark.parametrize("path", ["/ui/queues/a/b", "/ui/no/such/page/", "/ui/live/nothing/x"])
def test_an_unknown_path_gets_an_error_page(anyone: Visitor, path: str) -> None:
    answer = anyone.get(path)
    assert answer.status_code == 404
    assert "There is no such page" in answer.text
    assert "Go to the overview" in answer.text
    assert anyone.get("/ui/queues/").headers["Location"] == "../queues"


def test_failed_tasks_are_counted_before_a_bulk_retry(house: House, anyone: Visitor) -> None:
    page = anyone.get("/ui/tasks/retry?queue=mail.out").text
    assert "Retry 1 task" in page
    assert "secret of mail" in page
    anyone.post("/ui/tasks/retry", queue="mail.out", back="/ui/failures")
    assert anyone.said() == "Tasks being retried: 1."
    with house.engine.connect() as connection:
        assert connection.exec_driver_sql("DELETE FROM orchestrator.inbox").rowcount == 1


def test_the_count_of_failed_tasks_covers_only_the_latest(
    house: House, anyone: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redrive.preview_latest, "__defaults__", ("", 1))
    page = anyone.get("/ui/tasks/retry?name=t.a").text
    assert "Retry at least 1 task<" in page
    assert "latest tasks without success" in page
    page = anyone.get("/ui/tasks/retry?name=none").text
    assert "Retry all matching tasks" in page
    monkeypatch.undo()
    assert "No matching failed tasks" in anyone.get("/ui/tasks/retry?name=none").text


def test_a_backfill_previews_its_fires_before_it_starts(house: House, anyone: Visitor) -> None:
    path = "/ui/schedules/mail-flow/default/backfills"
    assert path in anyone.get("/ui/schedules").text
    assert "Choose a start date" in anyone.get(path).text
    page = anyone.get(f"{path}?start=2026-01-01&end=2026-02-01&concurrency=2").text
    for text in ("31 fires", "Thu 2026-01-01 06:00 UTC", "… 11 more", "Sat 2026-01-31 06:00 UTC", "Start 31 runs"):
        assert text in page, text
    assert "Mon 2026-01-12" not in page
    wrong = anyone.get(f"{path}?start=2026-02-01&end=2026-01-01")
    assert wrong.status_code == 422
    assert "A backfill covers the past" in wrong.text
    anyone.post(path, start="2026-01-01", end="2026-02-01", back="/ui/schedules")
    assert anyone.said().endswith("was requested: 31 fires.")


def test_a_backfill_with_too_many_fires_is_rejected_with_a_possible_end(
    house: House, anyone: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "_MAX_FIRES", 10)
    said = "Backfill the time before 2026-01-11T06:00:00+00:00 first, then continue from there."
    page = anyone.get("/ui/schedules/mail-flow/default/backfills?start=2026-01-01&end=2026-02-01")
    assert page.status_code == 422
    assert said in page.text
    path = "/api/v1/schedules/mail-flow/default/backfills"
    given = {"start": "2026-01-01", "end": "2026-02-01"}
    key = make_key(house, Scope.OPERATE)
    answer = house.send("POST", path, key, json=given)
    assert (answer.status_code, said in answer.json()["detail"]) == (422, True)
    given["end"] = "2026-01-11T06:00:00+00:00"
    assert house.send("POST", path, key, json=given).json()["total"] == 10
    backend = Backend(house.settings)  # the backend, as commands use it
    with pytest.raises(InvalidWorkflow, match="has more than 10 fires between") as caught:
        backend.schedules.preview_backfill("mail-flow/default", "2026-01-01", "2026-02-01", None, False)
    with pytest.raises(InvalidWorkflow, match="at most 20 years.* Backfill the time before 2020-01-16 first"):
        backend.schedules.preview_backfill("mail-flow/default", "2000-01-01", "2026-02-01", None, False)
    monkeypatch.undo()
    monkeypatch.setattr(schedules, "_MAX_PREVIEWED", 10)
    with pytest.raises(InvalidWorkflow, match="has more than 10 fires between"):
        backend.schedules.preview_backfill("mail-flow/default", "2026-01-01", "2026-02-01", None, False)
    backend.close()
    assert said in str(caught.value)


def test_marked_tasks_are_cancelled_together(house: House, anyone: Visitor) -> None:
    anyone.get("/ui/tasks")
    anyone.post("/ui/tasks/cancel-chosen", id=[str(house.tasks["mail"]), str(house.failed["mail"])])
    assert anyone.said().startswith("1 of 2 tasks are cancelled; 1 skipped")
    anyone.post("/ui/tasks/cancel-chosen")
    assert "The selection is empty" in anyone.said()
    with house.engine.connect() as connection:
        connection.exec_driver_sql("DELETE FROM orchestrator.inbox")


def test_searching_for_an_id_redirects_to_its_page(house: House, anyone: Visitor) -> None:
    task = house.tasks["mail"]
    assert anyone.get(f"/ui/search?text={task}").headers["Location"] == f"/ui/tasks/{task}"


def test_static_files_of_pages_are_served_as_immutable(anyone: Visitor) -> None:
    found = re.findall(r'(?:src|href)="(/ui/static/[^"]+)"', anyone.get("/ui").text)
    assert len(found) >= 4
    for path in found:
        answer = anyone.get(path)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["Cache-Control"]
    assert anyone.get("/ui/static/..%2Fserving.py").status_code == 404


def test_pages_are_no_part_of_the_documented_routes(anyone: Visitor) -> None:
    assert "/ui" not in anyone.get("/openapi.json").text
