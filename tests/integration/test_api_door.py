"""Who is let in at all: users of a proxy that is named, and nobody through one that is not; not who tries many keys."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from orchestrator.api import access, strangers
from orchestrator.api.app import create_app
from orchestrator.domain.access import Scope, Secret
from orchestrator.settings import load_settings
from orchestrator.store import audit, keys
from orchestrator.store.audit import AuditFilter
from orchestrator.store.database import engine_for

SSO = {"api_proxies": "10.0.0.5", "api_user_header": "X-User", "api_user_scope": "operate"}


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = engine_for(database_url, autocommit=True)
    with engine.connect() as connection:
        connection.exec_driver_sql("TRUNCATE orchestrator.api_keys, orchestrator.audit")
    yield engine
    engine.dispose()


class Server:
    """A server in this process, asked from any address."""

    def __init__(self, database_url: str, redis_url: str, **settings: Any) -> None:
        self._app = create_app(load_settings(environ={}, database_url=database_url, redis_url=redis_url, **settings))

    def ask(self, method: str, path: str, peer: str = "127.0.0.1", **headers: str) -> httpx.Response:
        given = {name.replace("_", "-"): value for name, value in headers.items()}

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self._app, client=(peer, 1234))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.request(method, path, headers=given)

        return asyncio.run(ask())


def new_key(engine: Engine) -> Secret:
    secret = Secret(secrets.token_hex(6), secrets.token_urlsafe(32))
    with engine.connect() as connection:
        keys.add(connection, secret, "test", Scope.ADMIN, None)
    return secret


def test_a_user_of_a_named_proxy_acts_under_their_own_name(engine: Engine, database_url: str, redis_url: str) -> None:
    server = Server(database_url, redis_url, **SSO)
    given = {"X_User": "alice", "X_Forwarded_For": "203.0.113.9"}
    assert server.ask("POST", "/api/v1/queues/mail/pause", "10.0.0.5", **given).status_code == 200
    assert server.ask("GET", "/api/v1/audit", "10.0.0.5", **given).status_code == 403  # needs admin
    with engine.connect() as connection:
        refused, done = audit.list_page(connection, AuditFilter(), limit=10)
    assert (done.who, done.origin, done.act) == ("alice", "203.0.113.9", "pause")
    assert (refused.act, refused.origin) == ("refused", "203.0.113.9")


def test_the_header_of_anybody_else_says_nothing(engine: Engine, database_url: str, redis_url: str) -> None:
    server = Server(database_url, redis_url, **SSO)
    for peer in ("127.0.0.1", "10.0.0.6", "203.0.113.9"):
        given = {"X_User": "alice", "X_Forwarded_For": "10.0.0.5"}
        assert server.ask("GET", "/api/v1/tasks", peer, **given).status_code == 401
    with engine.connect() as connection:
        origins = {line.origin for line in audit.list_page(connection, AuditFilter(), limit=10)}
    assert origins == {"127.0.0.1", "10.0.0.6", "203.0.113.9"}


@pytest.mark.parametrize("header", ["Forwarded", "X_Forwarded_For", "X_Real_IP", "Via"])
def test_without_keys_nobody_comes_through_a_proxy(
    engine: Engine, database_url: str, redis_url: str, header: str
) -> None:
    del engine
    server = Server(database_url, redis_url)
    assert server.ask("GET", "/api/v1/tasks").status_code == 200
    answer = server.ask("GET", "/api/v1/tasks", **{header: "1.2.3.4"})
    assert (answer.status_code, "keys create" in answer.json()["detail"]) == (403, True)


def test_who_tries_many_keys_is_sent_away_and_nobody_else(
    engine: Engine, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_REMEMBERED", 0.0)
    server, good, late = Server(database_url, redis_url), new_key(engine), new_key(engine)

    def status(key: Secret, peer: str = "203.0.113.9") -> int:
        return server.ask("GET", "/api/v1/tasks", peer, Authorization=f"Bearer {key}").status_code

    assert status(good) == 200
    wrong = Secret(good.id, "x" * 43)
    assert [status(wrong) for _ in range(strangers._TRIES)] == [401] * strangers._TRIES
    answer = server.ask("GET", "/api/v1/tasks", "203.0.113.9", Authorization=f"Bearer {wrong}")
    assert (answer.status_code, 0 < int(answer.headers["Retry-After"]) <= 60) == (429, True)
    assert status(late) == 429  # it cannot be told from a guess
    assert status(good) == 200  # it was good before
    assert status(late, "203.0.113.10") == 200
    monkeypatch.setattr(strangers, "_PERIOD", 0.0)
    assert status(late) == 200
