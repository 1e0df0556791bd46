"""The HTTP registry of services: registration, heartbeats, allocation, and what survives a loss of Redis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from redis import Redis
from sqlalchemy import Engine

from orchestrator.domain.executors.services import ServiceWorker, in_order
from orchestrator.settings import Settings, load_settings
from orchestrator.store.database import engine_for
from orchestrator.transport import announcements
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys
from tests.emptying import empty
from tests.integration.serving import serving

KEYS = Keys()


@pytest.fixture(scope="module")
def settings(database_url: str, redis_url: str) -> Settings:
    return load_settings(environ={}, database_url=database_url, redis_url=redis_url)


@pytest.fixture(scope="module")
def address(settings: Settings) -> Iterator[str]:
    with serving(settings) as found:
        yield found


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = engine_for(database_url, autocommit=True)
    with engine.connect() as connection:
        empty(connection, "services", "audit", "api_keys")
    yield engine
    engine.dispose()


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    redis = connect(redis_url)
    redis.delete(KEYS.services)
    yield redis
    redis.close()


@pytest.fixture
def http(address: str, engine: Engine, redis: Redis) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client


def register(http: httpx.Client, id: str, *offered: str, **more: Any) -> None:
    body = {"id": id, "url": f"http://127.0.0.1:8080/{id}/", "services": list(offered), **more}
    answer = http.post("/workers/register", json=body)
    assert (answer.status_code, answer.json()) == (200, {"ok": "1"}), answer.text


def beat(http: httpx.Client, id: str, load: float = 0) -> httpx.Response:
    return http.post("/workers/heartbeat", json={"id": id, "url": "ignored", "load": load})


def silence(redis: Redis, id: str, seconds: float) -> None:
    """Set back the time of a worker's last heartbeat."""
    entry, _ = announcements.find(redis, KEYS, id)
    assert entry is not None
    announcements.write(redis, KEYS, msgspec.structs.replace(entry, heard_at=entry.heard_at - seconds))


def listed(http: httpx.Client, **query: Any) -> list[str]:
    return [one["id"] for one in http.get("/workers/list", params=query).raise_for_status().json()]


def test_registered_workers_are_listed_by_service(http: httpx.Client) -> None:
    register(http, "a", "transform", "sum")
    register(http, "b", "sum", load=2)
    assert listed(http) == ["a", "b"]
    assert listed(http, service="transform") == ["a"]
    assert listed(http, service="sum") == ["a", "b"]
    [_, found] = http.get("/workers/list").json()
    moment = found.pop("lastHeartbeat")
    assert found == {
        "id": "b",
        "url": "http://127.0.0.1:8080/b",
        "services": ["sum"],
        "load": 2.0,
        "status": "online",
    }
    assert moment > 1_700_000_000
    register(http, "a")
    assert listed(http) == ["b"], "who offers nothing any more has left"


def test_silent_workers_are_neither_listed_nor_allocated(http: httpx.Client, redis: Redis) -> None:
    register(http, "a", "sum")
    silence(redis, "a", 15.5)
    assert listed(http, service="sum") == []
    assert listed(http, service="sum", ttl=60) == ["a"]
    answer = http.get("/workers/allocate", params={"service": "sum"})
    assert (answer.status_code, "No live worker offers" in answer.json()["detail"]) == (404, True)
    assert beat(http, "a", 3).status_code == 200
    found = http.get("/workers/allocate", params={"service": "sum"}).json()
    assert (found["id"], found["load"]) == ("a", 3.0)


def test_heartbeats_restore_the_registry_after_redis_lost_its_data(http: httpx.Client, redis: Redis) -> None:
    register(http, "a", "sum")
    redis.delete(KEYS.services)
    assert listed(http) == []
    assert beat(http, "a").status_code == 200
    assert listed(http, service="sum") == ["a"]
    unknown = beat(http, "nobody")
    assert (unknown.status_code, "/workers/register" in unknown.json()["detail"]) == (404, True)


def test_heartbeats_write_into_postgres_once_an_hour(http: httpx.Client, engine: Engine, redis: Redis) -> None:
    register(http, "a", "sum")

    def version() -> str:
        with engine.connect() as connection:
            return str(connection.exec_driver_sql("SELECT xmin FROM orchestrator.services").scalar_one())

    before = version()
    for load in range(5):
        assert beat(http, "a", load).status_code == 200
    register(http, "a", "sum")
    assert version() == before
    entry, _ = announcements.find(redis, KEYS, "a")
    assert entry is not None
    announcements.write(redis, KEYS, msgspec.structs.replace(entry, kept_at=entry.kept_at - 3_601))
    assert beat(http, "a").status_code == 200
    assert version() != before


def test_only_changed_registrations_are_written_to_the_audit_log(http: httpx.Client, engine: Engine) -> None:
    for offered in (("sum",), ("sum",), ("sum", "route")):
        register(http, "a", *offered)
    with engine.connect() as connection:
        acts = connection.exec_driver_sql("SELECT act, kind, target FROM orchestrator.audit").all()
    assert [tuple(act) for act in acts] == [("register", "service", "a")] * 2


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ({"id": "a b", "url": "http://h", "services": []}, "#/id"),
        ({"id": "a", "url": "ftp://h", "services": []}, "http://10.0.0.7:8080"),
        ({"id": "a", "url": "http://u:p@h", "services": []}, "user or password"),
        ({"id": "a", "url": "http://h?x=1", "services": []}, "/exec/<service>"),
        ({"id": "a", "url": "http://h:x", "services": []}, "port"),
        ({"id": "a", "url": "http://h", "services": ["a b"]}, "#/services"),
        ({"id": "a", "url": "http://h"}, "#/services"),
    ],
)
def test_an_invalid_registration_is_rejected(http: httpx.Client, body: Any, wrong: str) -> None:
    answer = http.post("/workers/register", json=body)
    assert (answer.status_code, wrong in answer.json()["detail"].replace("Port", "port")) == (422, True), answer.text
    assert listed(http) == []


def test_registrations_beyond_the_maximum_are_rejected(
    http: httpx.Client, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcements, "MAX_WORKERS", 2)
    register(http, "a", "sum")
    register(http, "b", "sum")
    full = http.post("/workers/register", json={"id": "c", "url": "http://h", "services": ["sum"]})
    assert full.status_code == 429
    register(http, "b", "sum", "route")
    silence(redis, "a", announcements.FORGOTTEN_AFTER + 1)
    register(http, "c", "sum")
    assert listed(http) == ["b", "c"]


def test_less_busy_workers_are_allocated_more_often(http: httpx.Client) -> None:
    register(http, "idle", "sum")
    register(http, "busy", "sum", load=9)
    asked = Counter(http.get("/workers/allocate?service=sum").json()["id"] for _ in range(200))
    assert asked["idle"] > 140  # about 182 on average
    assert asked["busy"] > 0


def test_the_order_includes_allocations_since_the_last_heartbeat() -> None:
    two = [ServiceWorker(id=id, url="http://h", services=("s",)) for id in ("a", "b")]
    draws = [0.5, 0.4]
    assert [one.id for one in in_order(two, draws, {})] == ["a", "b"]
    assert [one.id for one in in_order(two, draws, {"a": 5})] == ["b", "a"]
    assert [one.id for one in in_order(two, draws, {"a": 5}, by_load=False)] == ["a", "b"]
