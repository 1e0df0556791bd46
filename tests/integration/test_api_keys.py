"""Keys of the HTTP API: once a key exists, every route requires one with a sufficient scope."""

from __future__ import annotations

import asyncio
import re
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from click.testing import CliRunner
from sqlalchemy import Engine

from orchestrator.api import access
from orchestrator.api.app import create_app
from orchestrator.api.proxies import check_address
from orchestrator.api.routes import ROUTES, pull
from orchestrator.cli import main
from orchestrator.domain.access import Scope, Secret, parse
from orchestrator.errors import ConfigurationError
from orchestrator.settings import load_settings
from orchestrator.store import keys
from orchestrator.transport.pull import Pulls
from tests.integration.api_client import ApiClient, empty_engine, make_key  # noqa: F401

ID = "0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17"
GUARDED = [endpoint for endpoint in ROUTES if endpoint.scope is not None]


@pytest.fixture
def server(database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> ApiClient:
    monkeypatch.setattr(access, "_KEY_TTL", 0.0)
    monkeypatch.setattr(access, "_MAX_WRONG_KEYS", 10_000)
    return ApiClient(load_settings(environ={}, database_url=database_url, redis_url=redis_url))


def addresses() -> list[tuple[str, str]]:
    return [(one.method, re.sub(r"{\w+}", ID, one.path)) for one in GUARDED]


def test_every_route_rejects_missing_and_invalid_keys(engine: Engine, server: ApiClient) -> None:
    good = make_key(engine, Scope.ADMIN)
    expired = make_key(engine, expires_at=datetime.now(UTC) - timedelta(seconds=1))
    revoked = make_key(engine, Scope.ADMIN)
    with engine.connect() as connection:
        keys.revoke(connection, revoked.id)
    wrong = Secret(good.id, secrets.token_urlsafe(32))
    for key in (None, "orc_nonsense", expired, revoked, wrong, Secret("0" * 12, good.secret)):
        answers = server.send_all(*addresses(), key=key)
        assert {answer.status_code for answer in answers} == {401}, key
        assert all("WWW-Authenticate" in answer.headers for answer in answers)
    assert str(good) not in "".join(answer.text for answer in answers)


def test_every_route_rejects_an_insufficient_scope(engine: Engine, server: ApiClient) -> None:
    order = list(Scope)
    for number, scope in enumerate(order[:-1]):
        key = make_key(engine, scope)
        larger = [
            place
            for endpoint, place in zip(GUARDED, addresses(), strict=True)
            if endpoint.scope and order.index(endpoint.scope) > number
        ]
        answers = server.send_all(*larger, key=key)
        assert {answer.status_code for answer in answers} <= {403}, scope
    assert server.send_all(("GET", "/api/v1/tasks"), key=make_key(engine, Scope.READ))[0].status_code == 200


def test_health_probes_need_no_key(engine: Engine, server: ApiClient) -> None:
    make_key(engine, Scope.READ)
    assert [answer.status_code for answer in server.send_all(("GET", "/healthz"), ("GET", "/readyz"))] == [200, 200]


def test_a_waiting_poll_is_rejected_when_its_key_is_revoked(
    engine: Engine, server: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "_POLL_INTERVAL", 0.05)
    key = make_key(engine, Scope.OPERATE)
    looked = threading.Event()
    take = Pulls.take

    def taken(self: Pulls, worker: str, services: list[str]) -> object:
        looked.set()
        return take(self, worker, services)

    monkeypatch.setattr(Pulls, "take", taken)

    def revoke() -> None:
        assert looked.wait(30)
        with engine.connect() as connection:
            keys.revoke(connection, key.id)

    with ThreadPoolExecutor() as beside:
        revoked = beside.submit(revoke)
        answer = server.post("/queue/poll", {"worker_id": "w", "services": ["sum"], "wait": 60}, key=key)
        revoked.result()
    assert answer.status_code == 401


def test_an_unreachable_redis_gives_503_or_empty_logs(engine: Engine, database_url: str) -> None:
    server = ApiClient(load_settings(environ={}, database_url=database_url, redis_url="redis://127.0.0.1:1/0"))
    with engine.connect() as connection:
        connection.exec_driver_sql(
            "INSERT INTO orchestrator.tasks (id, name, queue, payload) VALUES (%s, 'a', 'a', '')", (ID,)
        )
        log, answer = server.send_all(("GET", f"/api/v1/tasks/{ID}/logs"), ("GET", "/api/v1/quarantine"))
        connection.exec_driver_sql("DELETE FROM orchestrator.tasks WHERE id = %s", (ID,))
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
    assert (log.status_code, log.json()) == (200, {"lines": [], "cursor": None})


def test_without_keys_only_local_clients_are_served(engine: Engine, server: ApiClient) -> None:
    assert server.send_all(("GET", "/api/v1/tasks"))[0].status_code == 200
    with pytest.raises(ConfigurationError, match="orchestrator keys create"):
        check_address("0.0.0.0", "0.0.0.0", requires_key=False)
    check_address("0.0.0.0", "0.0.0.0", requires_key=True)
    for host in ("127.0.0.1", "::1"):
        check_address(host, host, requires_key=False)


def test_commands_create_list_and_revoke_keys(
    engine: Engine, database_url: str, redis_url: str, server: ApiClient
) -> None:
    environment = {"ORCHESTRATOR_DATABASE_URL": database_url, "ORCHESTRATOR_REDIS_URL": redis_url}

    def run(*words: str) -> str:
        result = CliRunner().invoke(main, ["keys", *words], env=environment)
        assert result.exit_code == 0, result.output
        return result.stdout

    key = parse(run("create", "grafana", "--scope", "read", "--expires", "90d").strip())
    assert key is not None
    assert server.send_all(("GET", "/api/v1/tasks"), key=key)[0].status_code == 200
    assert re.search(rf"{key.id} +grafana +read +good", run("list"))
    assert key.secret not in run("list", "--json")
    with engine.connect() as connection:
        [stored] = keys.list_all(connection)
    assert key.secret.encode() not in stored.hash
    run("revoke", key.id)
    assert re.search(rf"{key.id} +grafana +read +revoked", run("list"))
    make_key(engine, Scope.READ)  # without keys, none is required
    assert server.send_all(("GET", "/api/v1/tasks"), key=key)[0].status_code == 401


def test_concurrent_requests_read_the_keys_once(
    database_url: str, redis_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Secret | None] = []
    read_keys = access.Authenticator.read_keys

    def counted(door: access.Authenticator, given: Secret | None = None) -> bool:
        looks.append(given)
        return read_keys(door, given)

    monkeypatch.setattr(access.Authenticator, "read_keys", counted)
    monkeypatch.setattr(access, "_KEY_TTL", 3_600.0)  # longer than a busy machine takes
    app = create_app(load_settings(environ={}, database_url=database_url, redis_url=redis_url))

    async def ask() -> set[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return {answer.status_code for answer in await asyncio.gather(*(client.get("/runs") for _ in range(40)))}

    assert asyncio.run(ask()) == {200}
    assert len(looks) == 1
