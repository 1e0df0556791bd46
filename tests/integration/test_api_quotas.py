"""Quotas of keys and connection limits of addresses, as clients meet them."""

from __future__ import annotations

import itertools
import socket
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import msgspec
import pytest

from orchestrator.api import quotas as meters
from orchestrator.api.app import create_app
from orchestrator.api.http_protocol import Connections, TimedProtocol
from orchestrator.domain.access import Scope, Secret
from orchestrator.domain.quotas import Quotas
from orchestrator.domain.tasks.callbacks import Callback, Callbacks
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import ConfigurationError
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.values.payload import encode_call
from tests.integration.api_client import make_key
from tests.integration.api_house import House
from tests.integration.serving import serving
from tests.waiting import eventually


def limited(house: House, **quotas: Any) -> Secret:
    return make_key(house.engine, Scope.ENQUEUE, "limited", quotas=Quotas(**quotas))


def enqueue(house: House, key: Secret, **more: Any) -> httpx.Response:
    return house.send("POST", "/api/v1/tasks", key, json={"name": "t.a", **more})


def test_a_rate_limited_key_gets_retry_after_without_affecting_other_keys(house: House) -> None:
    key = limited(house, rate=0.1)
    assert house.send("GET", "/api/v1/tasks", key).status_code == 200
    answer = house.send("GET", "/api/v1/tasks", key)
    assert (answer.status_code, answer.json()["title"]) == (429, "The quota is used up")
    assert 1 <= int(answer.headers["Retry-After"]) <= 11
    assert house.send("GET", "/api/v1/tasks", limited(house)).status_code == 200
    assert house.send("GET", "/healthz").status_code == 200


def test_request_bodies_count_against_the_megabytes_quota(house: House) -> None:
    key = limited(house, megabytes=0.001)
    assert enqueue(house, key, args=["x" * 2_000]).status_code == 201
    answer = enqueue(house, key)
    assert (answer.status_code, "megabytes" in answer.json()["detail"]) == (429, True)


def test_every_enqueue_call_enforces_priority_and_queue_quotas(house: House) -> None:
    key = limited(house, priority=0, queues=2)
    task = NewTask(new_id(), "t.a", "default", encode_call("a", [], {}, 1_000), priority=1)
    sent = msgspec.json.encode({"task": task})
    assert enqueue(house, key, priority=1).status_code == 403
    assert house.send("POST", "/api/v1/client/tasks/enqueue", key, content=sent).status_code == 403
    last = msgspec.json.encode(Callbacks("a", failure=(Callback("t.b", "default", priority=1),))).decode()
    followed = msgspec.json.encode({"task": msgspec.structs.replace(task, priority=0, callbacks=last)})
    assert house.send("POST", "/api/v1/client/tasks/enqueue", key, content=followed).status_code == 403
    assert enqueue(house, key, priority=0).status_code == 201
    many = {"tasks": [{"name": "t.a", "queue": name} for name in ("q1", "q2")]}
    answer = house.send("POST", "/api/v1/tasks/bulk", key, json=many)
    assert (answer.status_code, "quota queues" in answer.json()["detail"]) == (429, True)
    assert enqueue(house, key, queue="q1").status_code == 201


def test_a_full_queue_rejects_tasks_until_its_next_count(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "COUNT_INTERVAL", 0.0)
    key = limited(house, open_tasks=3)

    def add() -> int:
        body = {"name": "t.a", "queue": "full"}
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{address}/api/v1/tasks", json=body, headers=headers, timeout=30).status_code

    with serving(house.settings) as address:
        eventually(lambda: add() == 429, "it is full")
        with house.engine.connect() as connection:
            count = "SELECT count(*) FROM orchestrator.tasks WHERE queue = 'full'"
            assert 0 < connection.exec_driver_sql(count).scalar_one() <= 3
            connection.exec_driver_sql("DELETE FROM orchestrator.tasks WHERE queue = 'full'")
        eventually(lambda: add() == 201, "it is counted again")


def test_namespace_quotas_apply_to_all_keys_and_queues_together(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "COUNT_INTERVAL", 0.0)
    keys = [limited(house) for _ in range(2)]
    made = itertools.count()

    def add(**more: Any) -> httpx.Response:
        number = next(made)
        headers = {"Authorization": f"Bearer {keys[number % 2]}"}
        body = {"name": "t.a", "queue": f"own{number}", **more}
        return httpx.post(f"{address}/api/v1/tasks", json=body, headers=headers, timeout=30)

    with house.engine.begin() as connection:
        before = connection.exec_driver_sql("SELECT count(*) FROM orchestrator.tasks").scalar_one()
    with serving(replace(house.settings, api_quotas=f"open_tasks={before + 3}, priority=5")) as address:
        assert add(priority=6).status_code == 403
        eventually(lambda: add().status_code == 429, "all queues together are full")
        assert "The namespace has" in add().json()["detail"]
        with house.engine.begin() as connection:
            count = "SELECT count(*) FROM orchestrator.tasks"
            assert before < connection.exec_driver_sql(count).scalar_one() <= before + 3
            connection.exec_driver_sql("DELETE FROM orchestrator.tasks WHERE queue LIKE 'own%%'")
        eventually(lambda: add().status_code == 201, "it is counted again")
    with serving(replace(house.settings, api_quotas="rate=0.1")) as address:
        assert [add().status_code for _ in range(2)] == [201, 429]
    with pytest.raises(ConfigurationError, match="no quota 'rat'"):
        create_app(replace(house.settings, api_quotas="rat=1"))


def test_open_event_streams_count_against_the_streams_quota(house: House) -> None:
    key = limited(house, streams=2, concurrent=1)
    with serving(house.settings) as address, httpx.Client(headers={"Authorization": f"Bearer {key}"}) as client:

        def listen() -> httpx.Response:
            asked = client.build_request("GET", f"{address}/api/v1/status/events")
            return client.send(asked, stream=True)

        with closing(listen()) as first, closing(listen()) as second:
            assert (first.status_code, second.status_code) == (200, 200)
            with closing(listen()) as third:
                detail = third.read().decode()
            assert (third.status_code, "quota streams" in detail, "Retry-After" in third.headers) == (429, True, True)
            assert client.get(f"{address}/api/v1/tasks").status_code == 200

        def is_served() -> bool:
            with closing(listen()) as again:
                return again.status_code == 200

        eventually(is_served, "there is room again", every=0.1)


def test_connections_of_one_address_are_bounded(house: House) -> None:
    protocol = partial(TimedProtocol, connections=Connections(2, lambda _: False))
    with serving(house.settings, http=protocol) as address, ExitStack() as held:
        place = address.rpartition("/")[2].partition(":")

        def connect() -> socket.socket:
            return held.enter_context(socket.create_connection((place[0], int(place[2])), timeout=30))

        def asked(one: socket.socket) -> bytes:
            one.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return one.recv(12)

        first, second = connect(), connect()
        assert (asked(first), asked(second)) == (b"HTTP/1.1 200",) * 2
        answer = connect().recv(4_096)
        assert answer.startswith(b"HTTP/1.1 429 Too Many Requests")
        assert b"retry-after" in answer
        first.close()
        eventually(lambda: asked(connect()) == b"HTTP/1.1 200", "there is room again", every=0.1)


def test_exempt_addresses_have_no_connection_limit() -> None:
    connections = Connections(1, lambda address: address == "10.0.0.1")
    assert [connections.open("203.0.113.9"), connections.open("203.0.113.9")] == [True, False]
    assert all(connections.open("10.0.0.1") for _ in range(5))


def test_connection_limits_count_ipv6_networks_and_ipv4_addresses() -> None:
    connections = Connections(1, lambda _: False)
    assert [connections.open("2001:db8::1"), connections.open("2001:db8::2")] == [True, False]
    assert all(connections.open(f"::ffff:203.0.113.{number}") for number in range(3))
    connections.close("2001:db8::1")
    assert connections.open("2001:db8::2")
