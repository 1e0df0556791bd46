"""The API server alone: where it refuses to start, its answers to malformed requests, and its timeouts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from click.testing import CliRunner
from sqlalchemy import Engine

from orchestrator.api import access, bodies, http_protocol, server
from orchestrator.api.app import create_app
from orchestrator.api.http_protocol import TimedProtocol
from orchestrator.cli import main
from orchestrator.domain.access import masked
from orchestrator.errors import ConfigurationError
from orchestrator.settings import Settings
from orchestrator.store import audit, keys
from orchestrator.store.audit import AuditFilter
from orchestrator.telemetry import adopt_logs, close_output, configure_logging
from tests.integration.api_client import ApiClient, bare_settings, empty_engine, make_key  # noqa: F401
from tests.waiting import eventually


@contextlib.contextmanager
def serving(settings: Settings, **options: Any) -> Iterator[int]:
    """Serve in a thread; yield the port."""
    config = uvicorn.Config(
        create_app(settings), port=0, log_config=None, http=TimedProtocol, ws="none", proxy_headers=False, **options
    )
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        eventually(lambda: running.started, "it serves")
        yield running.servers[0].sockets[0].getsockname()[1]
    finally:
        running.should_exit = True
        thread.join(60)


def ask(settings: Settings, path: str, peer: str = "127.0.0.1", method: str = "GET", **headers: str) -> httpx.Response:
    answer: httpx.Response = ApiClient(settings).send(method, path, peer=peer, headers=headers)
    return answer


# -- public endpoints


def test_readiness_reveals_no_server_names(
    settings: Settings, engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_key(engine)
    monkeypatch.setattr(logging.getLogger("orchestrator"), "propagate", True)
    assert ask(settings, "/healthz").json() == {"status": "ok"}
    assert ask(settings, "/readyz").json() == {"status": "ready"}
    away = dataclasses.replace(settings, database_url="postgresql://me:secret@127.0.0.1:1/nowhere")
    answer = ask(away, "/readyz")
    assert answer.status_code == 503
    assert answer.json()["data"] == {"obstacles": ["postgres"]}
    assert len(answer.content) < 300
    for internal in ("127.0.0.1", "nowhere", "secret", "psycopg", "refused"):
        assert internal not in answer.text
    assert "127.0.0.1" in caplog.text
    assert ask(away, "/healthz").json() == {"status": "ok"}


# -- access without a valid key


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", socket.gethostname(), ""])
def test_without_keys_the_server_refuses_to_listen_on_public_addresses(settings: Settings, host: str) -> None:
    environment = {
        "ORCHESTRATOR_DATABASE_URL": settings.database_url,
        "ORCHESTRATOR_REDIS_URL": settings.redis_url,
    }
    addresses = {"127.0.0.1", "::1"}
    with contextlib.suppress(OSError):
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, 0)}
    if host == socket.gethostname() and addresses <= {"127.0.0.1", "127.0.1.1", "::1"}:
        pytest.skip("this machine's name leads to itself")
    result = CliRunner().invoke(main, ["api", "--host", host, "--port", "0"], env=environment)
    assert result.exit_code != 0
    assert "keys create" in result.output or "cannot listen" in result.output


def test_a_localhost_name_must_resolve_to_a_local_address(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("0.0.0.0", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    for host in ("localhost", "api.localhost"):
        with pytest.raises(ConfigurationError, match=r"0\.0\.0\.0"):
            server._listen(host, 0, False, requires_key=False)
    server._listen("localhost", 0, False, requires_key=True).close()


def test_remote_clients_need_a_key_whatever_host_header_they_send(settings: Settings) -> None:
    assert ask(settings, "/api/v1/tasks").status_code == 200
    for peer in ("203.0.113.9", "10.0.0.1", "::ffff:203.0.113.9", ""):
        assert ask(settings, "/api/v1/tasks", peer, Host="localhost").status_code == 403


def test_expired_and_revoked_keys_do_not_reopen_keyless_access(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_KEY_TTL", 0.0)
    make_key(engine, expires_at=datetime.now(UTC) - timedelta(seconds=1))
    assert ask(settings, "/api/v1/tasks").status_code == 401
    with engine.connect() as connection:
        keys.revoke(connection, make_key(engine).id)
    assert ask(settings, "/api/v1/tasks").status_code == 401


def test_foreign_hosts_and_origins_are_rejected(settings: Settings) -> None:
    assert ask(settings, "/api/v1/tasks", Host="evil.example").status_code == 421
    assert ask(settings, "/api/v1/tasks", Origin="https://evil.example").status_code == 403
    assert ask(settings, "/api/v1/tasks", Origin="null").status_code == 403


# -- response headers


def test_every_response_has_security_headers(settings: Settings, engine: Engine) -> None:
    key = make_key(engine)
    bearer = {"Authorization": f"Bearer {key}"}
    for path, given, status in (
        ("/api/v1/tasks", bearer, 200),
        ("/api/v1/tasks", {}, 401),
        ("/api/v1/nothing", bearer, 404),
        ("/docs", {}, 200),
        ("/openapi.json", {}, 200),
    ):
        answer = ask(settings, path, **given)
        assert answer.status_code == status
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


def test_cross_origin_requests_get_no_cors_headers(settings: Settings, engine: Engine) -> None:
    given = {"Authorization": f"Bearer {make_key(engine)}", "Origin": "https://evil.example"}
    for method in ("GET", "OPTIONS"):
        answer = ask(settings, "/api/v1/tasks", method=method, **given)
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]
    assert answer.status_code == 405


def test_keys_appear_in_no_log_and_no_audit_entry(
    settings: Settings, engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_KEY_TTL", 0.0)
    key = make_key(engine)
    with caplog.at_level(logging.DEBUG):
        ask(settings, f"/api/v1/queues/{key}/pause", method="POST")
        ask(settings, f"/api/v1/tasks?key={key}")
        ask(settings, "/api/v1/tasks", Authorization=f"Bearer {key}")
        ask(settings, f"/api/v1/workflows/{key}", Authorization=f"Bearer {key}")
    said = [record.getMessage() for record in caplog.records if record.name.startswith("orchestrator")]
    assert said
    assert key.secret not in "".join(said)
    with engine.connect() as connection:
        lines = audit.list_page(connection, AuditFilter(), limit=10)
    assert lines
    assert key.secret not in str(lines)
    assert masked(f"a {key} b") == f"a orc_{key.id}_••• b"


# -- raw HTTP


def exchange(port: int, sent: bytes) -> bytes:
    """Send bytes, and return the response until the server closes, which may be before all bytes are sent."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as link:
        with contextlib.suppress(ConnectionError):
            link.sendall(sent)
        got = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while part := link.recv(65_536):
                got += part
        return got


_HOST = b"Host: localhost\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /api/v1/tasks HTTP/1.1\r\n"
        + _HOST
        + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /api/v1/tasks HTTP/1.1\r\n" + _HOST + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcd",
        b"POST /api/v1/tasks HTTP/1.1\r\n" + _HOST + b"Content-Length: +4\r\n\r\nabcd",
        b"POST /api/v1/tasks HTTP/1.1\r\n" + _HOST + b"Content-Length : 4\r\n\r\nabcd",
        b"POST /api/v1/tasks HTTP/1.1\r\n" + _HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
        b"POST /api/v1/tasks HTTP/1.1\r\n" + _HOST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + _HOST + _HOST + b"\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + _HOST + b"X: " + b"a" * 1_000_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n" + _HOST + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=range(11),
)
def test_ambiguous_requests_are_rejected_and_close_the_connection(settings: Settings, sent: bytes) -> None:
    smuggled = b"GET /healthz HTTP/1.1\r\n" + _HOST + b"Connection: close\r\n\r\n"
    with serving(settings) as port:
        got = exchange(port, sent + smuggled)
    assert got.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501", b"HTTP/1.1 422")), got
    assert got.count(b"HTTP/1.1 ") == 1, got


_GET = b"GET /healthz HTTP/1.1\r\n"
_POST = b"POST /api/v1/tasks HTTP/1.1\r\n" + _HOST
_CHUNKED = _POST + b"Transfer-Encoding: chunked\r\n\r\n"
LAX = [
    b"GET /healthz HTTP/1.1\nHost: localhost\n\n",
    *(_GET + _HOST + head + b"\r\n\r\n" for head in (b"X: a\nY: b", b"X: a\rY: b", b"X: a\r\n folded", b" X: a")),
    *(_GET + _HOST + b"X: a" + byte + b"b\r\n\r\n" for byte in (b"\0", b"\x01", b"\x0b", b"\x7f")),
    *(_GET + _HOST + name + b": a\r\n\r\n" for name in (b"X y", b"X\t", b"", b"X(")),
    *(b"GET /healthz " + version + b"\r\n" + _HOST + b"\r\n" for version in (b"HTTP/2.0", b"HTTP/1.2", b"HTTP/0.9")),
    b"get /healthz HTTP/1.1\r\n" + _HOST + b"\r\n",
    b"CONNECT localhost:80 HTTP/1.1\r\n" + _HOST + b"\r\n",
    *(_POST + b"Content-Length: " + length + b"\r\n\r\nabcd" for length in (b"4, 4", b"0x4", b"-4", b"", b"4\x0b")),
    _POST + b"Content-Length: 4\r\nContent-Length: 4\r\n\r\nabcd",
    _POST + b"Content-Length: 18446744073709551620\r\n\r\nabcd",
    *(
        _POST + b"Transfer-Encoding: " + coding + b"\r\n\r\n0\r\n\r\n"
        for coding in (b"chunked, identity", b"identity", b"\x0bchunked", b"chunked\r\nTransfer-Encoding: identity")
    ),
    b"POST /api/v1/tasks HTTP/1.0\r\n" + _HOST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    *(_CHUNKED + size + b"\r\nabcd\r\n0\r\n\r\n" for size in (b"0x4", b"-4", b"4 ", b"f" * 17, b"4;a\nb")),
    _CHUNKED + b"4\nabcd\n0\n\n",
    _CHUNKED + b"4\r\nabcdXX0\r\n\r\n",
    _CHUNKED + b"0\r\nContent-Length: 5\r\nHost: evil\r\n\r\n",
]
"""Malformed requests that some servers and proxies accept."""


def test_malformed_requests_that_lax_parsers_accept_are_rejected(settings: Settings) -> None:
    with serving(settings) as port:
        for sent in LAX:
            got = exchange(port, sent)
            assert got.startswith(b"HTTP/1.1 400"), (sent, got)
            assert got.count(b"HTTP/1.1 ") == 1, (sent, got)


def test_trailers_of_a_chunked_request_are_not_headers(settings: Settings, engine: Engine) -> None:
    """A proxy may remove a header from the head of a request and pass on a trailer of the same name."""
    admin = b"Authorization: Bearer " + str(make_key(engine)).encode() + b"\r\n"
    get = b"GET /api/v1/queues HTTP/1.1\r\n" + _HOST + b"Connection: close\r\n"
    chunked = b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    with serving(settings) as port:
        assert exchange(port, get + admin + chunked + b"\r\n").startswith(b"HTTP/1.1 200")
        got = exchange(port, get + chunked + admin + b"\r\n")
    assert got.startswith(b"HTTP/1.1 401"), got


@pytest.mark.parametrize("after", [b"GARBAGE\r\n\r\n", _GET + b"\r\n"])
def test_bytes_after_a_request_are_not_part_of_the_request(settings: Settings, after: bytes) -> None:
    """Nor is the error about these bytes taken for the response to the request."""
    with serving(settings) as port:
        got = exchange(port, _GET + _HOST + b"\r\n" + after)
    assert got.startswith(b"HTTP/1.1 200"), got
    assert got.count(b"HTTP/1.1 2") == 1


def test_a_client_that_sends_its_head_slowly_is_disconnected(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT", 0.4)
    with serving(settings, timeout_keep_alive=60) as port:
        for begun in (
            b"",
            b"GET /healthz HTTP/1.1\r\nHost: loc",
            b"GET /healthz HTTP/1.1\r\n" + _HOST + b"\r\nGET /he",
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as link:
                link.sendall(begun)
                link.settimeout(0.1)
                assert _drip(link, until=time.monotonic() + 30), "it is still open"


def test_a_client_that_sends_its_body_slowly_is_disconnected(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_TIMEOUT", 0.3)
    head = b"POST /api/v1/tasks HTTP/1.1\r\n" + _HOST + b"Content-Length: 100000\r\n"
    with serving(settings, timeout_keep_alive=60) as port:
        got = exchange(port, head + b"\r\n{")
        assert got.startswith(b"HTTP/1.1 408"), got
        make_key(engine)
        monkeypatch.setattr(http_protocol, "DRAIN_TIMEOUT", 0.4)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as link:  # answered with 401 unread
            link.sendall(head + b"Authorization: Bearer orc_x\r\n\r\n{")
            link.settimeout(0.1)
            assert _drip(link, until=time.monotonic() + 30), "it is still open"


def test_expect_continue_with_an_oversized_body_is_rejected(settings: Settings) -> None:
    length = b"Content-Length: %d\r\n" % (bodies.MAX_BODY + 1)
    with serving(settings) as port:
        got = exchange(port, b"POST /api/v1/tasks HTTP/1.1\r\n" + _HOST + length + b"Expect: 100-continue\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 413"), got


def test_expect_continue_is_answered_with_100(settings: Settings) -> None:
    body = b'{"name": "t.a"}'
    head = b"POST /api/v1/tasks HTTP/1.1\r\n" + _HOST + b"Content-Length: %d\r\n" % len(body)
    with serving(settings) as port, socket.create_connection(("127.0.0.1", port), timeout=60) as link:
        link.sendall(head + b"Expect: 100-continue\r\nConnection: close\r\n\r\n")
        assert link.recv(1000).startswith(b"HTTP/1.1 100 ")
        link.sendall(body)
        got = b""
        while more := link.recv(65_536):
            got += more
    assert got.startswith(b"HTTP/1.1 201"), got


def test_malformed_requests_get_a_problem_response_and_a_log_line(
    settings: Settings, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {name: logging.getLogger(name).handlers[:] for name in ("orchestrator", "uvicorn", "asyncio")}
    configure_logging("info", "json")
    adopt_logs("uvicorn", "asyncio")
    try:
        with serving(settings) as port:
            got = exchange(port, b"what is this\r\n\r\n")
    finally:
        close_output()
        for name, handlers in before.items():
            logging.getLogger(name).handlers[:] = handlers
            logging.getLogger(name).propagate = True
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400"), got
    assert b"application/problem+json" in head
    assert json.loads(body)["title"] == "The request is not valid HTTP/1.1"
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert "Invalid HTTP request received." in [line["message"] for line in lines]


def _drip(link: socket.socket, until: float) -> bool:
    """Send a byte now and then; return whether the server closes in time."""
    while time.monotonic() < until:
        try:
            if not link.recv(65_536):
                return True
        except TimeoutError:
            with contextlib.suppress(ConnectionError):
                link.sendall(b"a")
        except ConnectionError:
            return True
    return False


def test_the_server_serves_tls(settings: Settings, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    chain, key = tmp_path / "api.pem", tmp_path / "api.key"
    words = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout {key} -out {chain}"
    subprocess.run([*words.split(), "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    server._check_certificate(server.Certificate(str(chain), str(key)))
    for wrong in (server.Certificate(str(chain), None), server.Certificate(str(tmp_path / "none"), str(key))):
        with pytest.raises(ConfigurationError, match="--tls-cert"):
            server._check_certificate(wrong)
    with serving(settings, ssl_certfile=str(chain), ssl_keyfile=str(key)) as port:
        trusted = ssl.create_default_context(cafile=str(chain))
        answer = httpx.get(f"https://localhost:{port}/healthz", verify=trusted, timeout=60)
        assert answer.status_code == 200
        assert "max-age" in answer.headers["Strict-Transport-Security"]
        assert not exchange(port, b"GET /healthz HTTP/1.1\r\n" + _HOST + b"\r\n").startswith(b"HTTP/1.1 200")
