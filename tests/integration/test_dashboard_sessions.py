"""A login starts a session: the browser stores no key, Postgres no ticket, and every server learns of its end."""

from __future__ import annotations

import re
import secrets

import pytest
from sqlalchemy import Engine
from starlette.applications import Starlette

from orchestrator.api import access
from orchestrator.api.app import create_app
from orchestrator.domain.access import Scope, Secret
from orchestrator.settings import load_settings
from orchestrator.store import keys, retention
from tests.integration.api_client import empty_engine, make_key  # noqa: F401
from tests.integration.visitor import SESSION, Visitor


@pytest.fixture
def key(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Secret:
    monkeypatch.setattr(access, "_KEY_TTL", 0.0)
    return make_key(engine, Scope.OPERATE, "ada")


@pytest.fixture
def app(database_url: str, redis_url: str) -> Starlette:
    return server(database_url, redis_url)


def server(database_url: str, redis_url: str) -> Starlette:
    return create_app(load_settings(environ={}, database_url=database_url, redis_url=redis_url))


def test_the_browser_keeps_no_key_and_postgres_no_ticket(app: Starlette, engine: Engine, key: Secret) -> None:
    visitor = Visitor(app)
    visitor.log_in(key)
    assert visitor.get("/ui").status_code == 200
    ticket = visitor.cookies[SESSION]
    assert not any(key.secret in value for value in visitor.cookies.values())
    with engine.connect() as connection:
        [stored] = connection.exec_driver_sql("SELECT s::text FROM orchestrator.sessions s").scalars()
        [noted] = connection.exec_driver_sql("SELECT a::text FROM orchestrator.audit a WHERE act = 'log in'").scalars()
    assert ticket not in stored
    assert ticket.encode().hex() not in stored
    assert f"ada ({key.id})" in noted
    answer = visitor._send("GET", "/api/v1/tasks", {"Authorization": f"Bearer {ticket}"})
    assert answer.status_code == 401, "a ticket is no key"


def test_every_server_accepts_a_session_until_it_ends(
    app: Starlette, engine: Engine, key: Secret, database_url: str, redis_url: str
) -> None:
    visitor = Visitor(app)
    visitor.log_in(key)
    elsewhere = Visitor(server(database_url, redis_url))
    elsewhere.cookies = dict(visitor.cookies)
    kept = Visitor(app)
    kept.cookies = dict(visitor.cookies)
    assert elsewhere.get("/ui").status_code == 200
    assert visitor.post("/ui/logout").headers["Location"] == "/ui/login"
    assert SESSION not in visitor.cookies
    for one in (elsewhere, kept):
        assert one.get("/ui").headers["Location"] == "/ui/login"
        assert SESSION not in one.cookies, "the browser is told to forget it"


def test_a_session_ends_at_its_expiry_or_with_its_key(app: Starlette, engine: Engine, key: Secret) -> None:
    def end_by(statement: str) -> int:
        visitor = Visitor(app)
        visitor.log_in(key)
        assert visitor.get("/ui").status_code == 200
        with engine.connect() as connection:
            connection.exec_driver_sql(statement)
        return visitor.get("/ui").status_code

    assert end_by("UPDATE orchestrator.sessions SET expires_at = now()") == 303
    with engine.connect() as connection:
        assert retention.forget_expired(connection, "sessions", 1_000) == 1
    assert end_by("UPDATE orchestrator.api_keys SET expires_at = now()") == 303
    with engine.connect() as connection:
        connection.exec_driver_sql("UPDATE orchestrator.api_keys SET expires_at = NULL")
    assert end_by("UPDATE orchestrator.api_keys SET revoked_at = now()") == 303, "as earlier releases revoke"
    with engine.connect() as connection:
        keys.revoke(connection, key.id)
        left = connection.exec_driver_sql("SELECT count(*) FROM orchestrator.sessions").scalar()
    assert left == 0


def test_a_form_of_an_ended_session_redirects_to_the_login(app: Starlette, engine: Engine, key: Secret) -> None:
    visitor = Visitor(app)
    visitor.log_in(key)
    token = visitor.token()
    with engine.connect() as connection:
        connection.exec_driver_sql("UPDATE orchestrator.sessions SET expires_at = now()")
    sent = {"Origin": "http://localhost", "Referer": "http://localhost/ui/queues/mail?x=1"}
    answer = visitor.post("/ui/queues/mail/pause", token=token, headers=sent)
    assert answer.status_code == 303
    assert answer.headers["Location"] == "/ui/login?to=%2Fui%2Fqueues%2Fmail%3Fx%3D1"
    page = visitor.get(answer.headers["Location"]).text
    assert "Nothing was changed" in page
    assert 'value="/ui/queues/mail?x=1"' in page
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM orchestrator.queues WHERE paused").scalar() == 0
    for elsewhere in ("http://evil.example/ui/queues", "http://localhost/elsewhere", "\\", ""):
        answer = visitor.post("/ui/queues/mail/pause", token=token, headers={"Referer": elsewhere})
        assert answer.headers["Location"] == "/ui/login"
    program = visitor.post("/ui/queues/mail/pause", token=token, headers={"Authorization": "Bearer orc_x"})
    assert program.status_code == 401, "whoever shows a key is told about that"


def test_a_new_login_ends_the_previous_session(app: Starlette, engine: Engine, key: Secret) -> None:
    visitor = Visitor(app)
    visitor.log_in(key)
    first = dict(visitor.cookies)
    visitor.log_in(key)
    assert visitor.cookies[SESSION] != first[SESSION]
    assert visitor.get("/ui").status_code == 200
    visitor.cookies = first
    assert visitor.get("/ui").status_code == 303


def test_a_form_token_is_valid_for_one_session(app: Starlette, engine: Engine, key: Secret) -> None:
    ada, bob = Visitor(app), Visitor(app)
    ada.log_in(key)
    bob.log_in(key)
    bob.cookies["orchestrator_form"] = "x" * 32
    for token in (ada.token(), bob.cookies["orchestrator_form"], ""):
        assert bob.post("/ui/queues/mail/pause", token=token).status_code == 403
    assert bob.post("/ui/queues/mail/pause").status_code == 303


def test_invalid_session_cookies_do_not_count_as_wrong_keys(
    app: Starlette, engine: Engine, key: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_MAX_WRONG_KEYS", 3)
    for _ in range(6):
        stranger = Visitor(app)
        stranger.cookies[SESSION] = secrets.token_urlsafe(32)
        assert stranger.get("/ui").headers["Location"] == "/ui/login"
    for text in ("x", "%C3" * 20, "a" * 10_000):
        stranger.cookies[SESSION] = text
        assert stranger.get("/ui").status_code == 303
    visitor = Visitor(app)
    visitor.log_in(key)
    assert visitor.get("/ui").status_code == 200


def test_a_key_cookie_of_an_earlier_release_is_removed(app: Starlette, engine: Engine, key: Secret) -> None:
    visitor = Visitor(app)
    visitor.cookies["orchestrator_key"] = str(key)
    assert visitor.get("/ui").status_code == 303
    assert re.search("Max-Age=0", visitor.set["orchestrator_key"])


def test_a_login_form_from_another_tab_redirects_to_its_page(app: Starlette, engine: Engine, key: Secret) -> None:
    visitor = Visitor(app)
    visitor.get("/ui/login?to=%2Fui%2Fqueues")
    second = visitor.token()
    visitor.log_in(key)
    ticket = visitor.cookies[SESSION]
    answer = visitor.post("/ui/login", token=second, key=str(key), to="/ui/queues")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/ui/queues")
    assert visitor.cookies[SESSION] == ticket
    assert visitor.get("/ui/queues").status_code == 200
    assert visitor.post("/ui/queues/a/pause", token=second).status_code == 403
