"""The text that Prometheus scrapes, and the small server that returns it."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator

import pytest

from orchestrator.errors import ConfigurationError
from orchestrator.monitoring import listener as listening
from orchestrator.monitoring.exposition import (
    MAX_QUEUES,
    OTHER_QUEUES,
    Family,
    Histogram,
    counter,
    gauge,
    histogram,
    render,
)
from orchestrator.monitoring.listener import Listener, parse_address
from orchestrator.monitoring.system import bounded
from orchestrator.store.load import QueueLoad
from tests.waiting import eventually


def test_samples_are_written_with_escaped_labels() -> None:
    text = render(
        [
            gauge("up", "Whether\nit is.", ({}, 1)),
            counter("done_total", "Done.", ({"queue": 'a"b\\c\nd', "state": "é"}, 0.5), ({"queue": "x"}, 3)),
            gauge("nothing", "Has no samples."),
        ]
    ).decode()
    assert text.splitlines() == [
        "# HELP up Whether\\nit is.",
        "# TYPE up gauge",
        "up 1",
        "# HELP done_total Done.",
        "# TYPE done_total counter",
        'done_total{queue="a\\"b\\\\c\\nd",state="é"} 0.5',
        'done_total{queue="x"} 3',
    ]


def test_histogram_buckets_are_cumulative() -> None:
    times = Histogram((0.1, 1))
    times.add(0.1)
    times.add(0.5, times=3)
    times.add(60)
    assert render([histogram("t", "T.", ({"queue": "a"}, times))]).decode().splitlines()[2:] == [
        't_bucket{queue="a",le="0.1"} 1',
        't_bucket{queue="a",le="1"} 4',
        't_bucket{queue="a",le="+Inf"} 5',
        't_sum{queue="a"} 61.6',
        't_count{queue="a"} 5',
    ]


def test_the_busiest_queues_have_labels_and_the_rest_shares_one_label() -> None:
    loads = [
        QueueLoad(queue=f"q{n}", ready=n, delayed=1, in_flight=0, oldest=float(n), slots=1, paused=n == 0)
        for n in range(MAX_QUEUES + 5)
    ]
    found = bounded(loads)
    assert len(found) == MAX_QUEUES + 1
    other = QueueLoad(
        queue=OTHER_QUEUES, ready=0 + 1 + 2 + 3 + 4, delayed=5, in_flight=0, oldest=4.0, slots=1, paused=True
    )
    assert found[-1] == other
    assert bounded(loads[:3]) == loads[:3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("9464", ("127.0.0.1", 9464)), ("0.0.0.0:1", ("0.0.0.0", 1)), ("[::1]:0", ("::1", 0)), ("a.b:80", ("a.b", 80))],
)
def test_a_port_alone_means_the_local_machine(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["", "x", "70000", ":80", "-1", "a:b", "1.2.3.4:", "²"])
def test_an_invalid_address_is_rejected(text: str) -> None:
    with pytest.raises(ConfigurationError, match="Setting metrics: expected a port"):
        parse_address(text)


class Subject:
    """A process that can have problems."""

    def __init__(self) -> None:
        self.trouble: dict[str, str] = {}

    def metrics(self) -> Iterator[Family]:
        if "defect" in self.trouble:
            raise ZeroDivisionError
        yield gauge("answer", "The answer.", ({}, 42))

    def obstacles(self) -> dict[str, str]:
        return self.trouble


@pytest.fixture
def subject() -> Subject:
    return Subject()


@pytest.fixture
def server(subject: Subject) -> Iterator[Listener]:
    listener = Listener("0", subject, logging.getLogger("test"))
    with listener.in_thread():
        yield listener
    listener.close()


def connect(server: Listener) -> socket.socket:
    assert server._socket is not None
    return socket.create_connection(server._socket.getsockname(), timeout=60)


def ask(server: Listener, request: str) -> tuple[int, str]:
    with connect(server) as connection:
        connection.sendall(request.encode())
        parts = iter(lambda: connection.recv(65_536), b"")
        head, _, body = b"".join(parts).decode().partition("\r\n\r\n")
    return int(head.split()[1]), body


def get(server: Listener, path: str) -> tuple[int, str]:
    return ask(server, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n")


def test_metrics_health_and_readiness_are_served(
    server: Listener, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert get(server, "/metrics?x=1") == (200, "# HELP answer The answer.\n# TYPE answer gauge\nanswer 42\n")
    assert get(server, "/healthz") == (200, '{"status": "ok"}\n')
    assert get(server, "/readyz") == (200, '{"status": "ready"}\n')
    subject.trouble["redis"] = "away"
    status, body = get(server, "/readyz")
    assert (status, json.loads(body)) == (503, {"status": "not ready", "obstacles": {"redis": "away"}})
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(listening, "_is_local", lambda _: False)
        status, body = get(server, "/readyz")
    assert (status, json.loads(body)["obstacles"]) == (503, {"redis": listening.REASON_HIDDEN})
    assert get(server, "/healthz")[0] == 200
    assert ask(server, "HEAD /healthz HTTP/1.1\r\n\r\n") == (200, "")


def test_invalid_requests_are_rejected_and_a_defect_does_not_stop_the_server(
    server: Listener, subject: Subject
) -> None:
    assert get(server, "/etc/passwd")[0] == 404
    assert ask(server, "POST /metrics HTTP/1.1\r\n\r\n")[0] == 405
    assert ask(server, "\r\n\r\n")[0] == 400
    subject.trouble["defect"] = "yes"
    assert get(server, "/metrics")[0] == 503
    assert get(server, "/healthz")[0] == 200


def test_silent_and_oversized_clients_do_not_block_the_server(
    server: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [connect(server) for _ in range(listening._MAX_CONNECTIONS - 1)]
    assert get(server, "/healthz")[0] == 200
    with connect(server) as loud:
        loud.sendall(b"x" * listening._MAX_REQUEST)
        assert loud.recv(1) == b""
    monkeypatch.setattr(listening, "_TIMEOUT", 0.1)
    for connection in silent:
        assert connection.recv(1) == b""
        connection.close()


def test_listening_on_a_taken_address_is_retried(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listening, "_RETRY_INTERVAL", 0.05)
    monkeypatch.setattr(listening, "_CHECK_INTERVAL", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listener = Listener(str(taken.getsockname()[1]), subject, logging.getLogger("test"))
        thread = listener.in_thread()
        thread.__enter__()
        assert "metrics.not_served host=127.0.0.1" in caplog.text
    eventually(lambda: listener._socket, "the address is free")
    assert get(listener, "/healthz")[0] == 200
    thread.__exit__(None, None, None)
    listener.close()
