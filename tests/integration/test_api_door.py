"""Who may reach the API: users of a trusted proxy, but not of other proxies, and not clients that try many keys."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from orchestrator.api import access
from orchestrator.domain.access import Scope, Secret
from orchestrator.settings import load_settings
from orchestrator.store import audit, keys
from orchestrator.store.audit import AuditFilter
from tests.integration.api_client import ApiClient, empty_engine, make_key  # noqa: F401

SSO = {"api_proxies": "10.0.0.5", "api_user_header": "X-User", "api_user_scope": "operate"}


class Server(ApiClient):
    """A server in this process, called from any address."""

    def __init__(self, database_url: str, redis_url: str, **settings: Any) -> None:
        super().__init__(load_settings(environ={}, database_url=database_url, redis_url=redis_url, **settings))

    def ask(self, method: str, path: str, peer: str = "127.0.0.1", **headers: str) -> httpx.Response:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        answer: httpx.Response = self.send(method, path, peer=peer, headers=given)
        return answer


def test_a_user_of_a_trusted_proxy_acts_under_their_own_name(engine: Engine, database_url: str, redis_url: str) -> None:
    server = Server(database_url, redis_url, **SSO)
    given = {"X_User": "alice", "X_Forwarded_For": "203.0.113.9"}
    assert server.ask("POST", "/api/v1/queues/mail/pause?new=true", "10.0.0.5", **given).status_code == 200
    assert server.ask("GET", "/api/v1/audit", "10.0.0.5", **given).status_code == 403  # needs admin
    with engine.connect() as connection:
        refused, done = audit.list_page(connection, AuditFilter(), limit=10)
    assert (done.who, done.origin, done.act) == ("alice", "203.0.113.9", "pause")
    assert (refused.who, refused.act, refused.origin) == ("alice", "refused", "203.0.113.9")


def test_rejected_requests_are_audited_with_the_key_name(engine: Engine, database_url: str, redis_url: str) -> None:
    server, small, revoked = Server(database_url, redis_url), make_key(engine, scope=Scope.READ), make_key(engine)
    with engine.connect() as connection:
        keys.revoke(connection, revoked.id)
    for key in (small, revoked, Secret(small.id, "x" * 43)):
        server.ask("POST", "/api/v1/queues/mail/pause?new=true", Authorization=f"Bearer {key}")
    with engine.connect() as connection:
        who = [line.who for line in reversed(audit.list_page(connection, AuditFilter(), limit=10))]
    assert who == [f"test ({small.id})", f"test ({revoked.id})", f"? ({small.id})"]


@pytest.mark.parametrize("sent", ["Bearer orc_0123456789ab_cut", "Basic YTpi", "orc_0123456789ab_cut"])
def test_an_invalid_authorization_header_is_not_taken_for_a_missing_key(
    engine: Engine, database_url: str, redis_url: str, sent: str
) -> None:
    make_key(engine)
    server = Server(database_url, redis_url)
    answer = server.ask("GET", "/api/v1/tasks", Authorization=sent)
    assert (answer.status_code, "header is invalid" in answer.json()["detail"]) == (401, True)
    assert "cut" not in answer.text
    assert "Send an API key" in server.ask("GET", "/api/v1/tasks").json()["detail"]


def test_the_user_header_of_an_untrusted_peer_is_ignored(engine: Engine, database_url: str, redis_url: str) -> None:
    server = Server(database_url, redis_url, **SSO)
    for peer in ("127.0.0.1", "10.0.0.6", "203.0.113.9"):
        given = {"X_User": "alice", "X_Forwarded_For": "10.0.0.5"}
        assert server.ask("GET", "/api/v1/tasks", peer, **given).status_code == 401
    with engine.connect() as connection:
        origins = {line.origin for line in audit.list_page(connection, AuditFilter(), limit=10)}
    assert origins == {"127.0.0.1", "10.0.0.6", "203.0.113.9"}


@pytest.mark.parametrize("header", ["Forwarded", "X_Forwarded_For", "X_Real_IP", "Via"])
def test_without_keys_proxied_requests_are_rejected(
    engine: Engine, database_url: str, redis_url: str, header: str
) -> None:
    del engine
    server = Server(database_url, redis_url)
    assert server.ask("GET", "/api/v1/tasks").status_code == 200
    answer = server.ask("GET", "/api/v1/tasks", **{header: "1.2.3.4"})
    assert (answer.status_code, "keys create" in answer.json()["detail"]) == (403, True)


def test_without_keys_cross_site_requests_are_rejected(engine: Engine, database_url: str, redis_url: str) -> None:
    server, site = Server(database_url, redis_url), "Sec_Fetch_Site"
    for path in ("/api/v1/tasks", "/ui"):
        assert server.ask("GET", path, **{site: "cross-site"}).status_code == 403
        for own in ("same-origin", "none"):
            assert server.ask("GET", path, **{site: own}).status_code == 200
    key = make_key(engine)
    given = {site: "cross-site", "Authorization": f"Bearer {key}"}
    assert Server(database_url, redis_url).ask("GET", "/api/v1/tasks", **given).status_code == 200


def test_wrong_keys_are_rate_limited_but_valid_keys_still_work(
    engine: Engine, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_KEY_TTL", 0.0)
    server, good, late = Server(database_url, redis_url), make_key(engine), make_key(engine)

    def status(key: Secret, peer: str = "203.0.113.9") -> int:
        return server.ask("GET", "/api/v1/tasks", peer, Authorization=f"Bearer {key}").status_code

    assert status(good) == 200
    wrong = Secret(good.id, "x" * 43)
    assert [status(wrong) for _ in range(access._MAX_WRONG_KEYS)] == [401] * access._MAX_WRONG_KEYS
    answer = server.ask("GET", "/api/v1/tasks", "203.0.113.9", Authorization=f"Bearer {wrong}")
    assert (answer.status_code, 0 < int(answer.headers["Retry-After"]) <= 60) == (429, True)
    assert "wrong keys from '203.0.113.9'" in answer.json()["detail"]
    assert status(Secret("0" * 12, "x" * 43)) == 429
    assert status(good) == 200
    assert status(late) == 200  # a key that is not cached yet
    assert status(wrong, "203.0.113.10") == 401
    monkeypatch.setattr(access, "_PERIOD", 0.0)
    assert status(wrong) == 401


def test_revoked_and_expired_keys_do_not_count_as_wrong_keys(engine: Engine, database_url: str, redis_url: str) -> None:
    server, good, revoked = Server(database_url, redis_url), make_key(engine), make_key(engine)
    expired = make_key(engine, expires_at=datetime.now(UTC) - timedelta(seconds=1))
    with engine.connect() as connection:
        keys.revoke(connection, revoked.id)

    def status(key: Secret) -> int:
        return server.ask("GET", "/api/v1/tasks", Authorization=f"Bearer {key}").status_code

    for known in (revoked, expired):  # no guess: nobody knows its secret by chance
        assert {status(known) for _ in range(access._MAX_WRONG_KEYS + 5)} == {401}
    assert status(Secret("0" * 12, "x" * 43)) == 401
    assert status(good) == 200
