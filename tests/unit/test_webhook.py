"""Destinations of webhooks, whatever a workflow names: public addresses, and those that the operator allows."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator import GiveUp, Orchestrator
from orchestrator.domain.tasks.destinations import Destinations, is_public, parse_address, parse_destinations
from orchestrator.errors import ConfigurationError
from orchestrator.workers.functions import WebhookFailed, install, post

PUBLIC = parse_destinations("public", "")
HERE = parse_destinations("public", "127.0.0.0/8")


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.received.append((self.path, self.headers["Host"], body))
        status, location = self.server.answer
        self.send_response(status)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


class Server(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.received: list[tuple[str, str, Any]] = []
        self.answer: tuple[int, str] = (204, "")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "10.0.0.1",
            "172.16.3.4",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
        ),
        *("192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%lo"),
        *("fc00::1", "fd12:3456::1", "fec0::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1"),
        *("64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::", "2001:db8::1", "3fff::1", "3fff:fff::1", "5f00::1"),
    ],
)
def test_internal_addresses_are_rejected_as_not_public(address: str) -> None:
    assert not is_public(parse_address(address))
    assert "internal address" in (PUBLIC.refusal("name", address) or "")
    assert parse_destinations("public", "name").refusal("NAME.", address) is None


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946", "::ffff:8.8.8.8"]
)
def test_public_addresses_are_allowed_unless_a_list_restricts_them(address: str) -> None:
    assert PUBLIC.refusal("example.com", address) is None
    only = parse_destinations("allowed", "*.example.com")
    assert only.refusal("hooks.example.com", address) is None
    assert "webhook_allow" in (only.refusal("example.com.evil.org", address) or "")
    assert "webhook_allow" in (only.refusal("example.com", address) or "")


def test_the_operator_allows_hosts_and_networks() -> None:
    found = parse_destinations("public", "Hooks.corp, *.internal.  10.1.0.0/16,::1")
    assert found == Destinations(
        mode="public", hosts=("hooks.corp", "*.internal"), networks=parse_destinations("", "10.1.0.0/16 ::1").networks
    )
    assert found.refusal("any", "10.1.2.3") is None
    assert found.refusal("any", "10.2.2.3") is not None
    assert found.refusal("a.internal", "10.2.2.3") is None
    for wrong in ("http://hooks.corp", "10.0.0.0/99", "a:80", "**", "a;b"):
        with pytest.raises(ConfigurationError, match="Setting webhook_allow: "):
            parse_destinations("public", wrong)


def test_an_allowed_webhook_is_posted(server: Server) -> None:
    assert post(f"{server.url}/a b?c=d é", {"x": [1]}, HERE) == 204
    host = f"127.0.0.1:{server.server_port}"
    assert server.received == [("/a%20b?c=d%20%C3%A9", host, {"x": [1]})]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0x7f.1", "2130706433", "127.1", "[::ffff:127.0.0.1]", "0"])
def test_the_local_machine_is_rejected_in_every_notation(server: Server, host: str) -> None:
    with pytest.raises(GiveUp, match=r"is an internal address, and not in webhook_allow"):
        post(f"http://{host}:{server.server_port}/", {}, PUBLIC)
    assert not server.received


def test_redirects_are_not_followed(server: Server) -> None:
    server.answer = (302, f"{server.url}/elsewhere")
    with pytest.raises(WebhookFailed, match="answered with status 302.*Redirects are not followed"):
        post(server.url, {}, HERE)
    assert len(server.received) == 1
    server.answer = (500, "")
    with pytest.raises(WebhookFailed, match=r"answered with status 500, expected 2xx\.$"):
        post(server.url, {}, HERE)


def test_a_host_name_is_resolved_only_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second lookup could return another address for the connection."""
    real = socket.getaddrinfo
    asked: list[str] = []

    def changing(host: str, *arguments: Any, **options: Any) -> Any:
        if host != "changing.example":
            return real(host, *arguments, **options)
        asked.append(host)
        address = "127.0.0.1" if len(asked) == 1 else "127.0.0.2"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, server.server_port))]

    monkeypatch.setattr(socket, "getaddrinfo", changing)
    assert post(f"http://changing.example:{server.server_port}/", {}, parse_destinations("public", "127.0.0.1")) == 204
    assert asked == ["changing.example"]
    assert server.received[0][1] == f"changing.example:{server.server_port}"


def test_only_allowed_addresses_of_a_host_are_used(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def several(host: str, *arguments: Any, **options: Any) -> Any:
        if host != "several.example":
            return real(host, *arguments, **options)
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, server.server_port))
            for address in ("10.255.255.1", "127.0.0.1")
        ]

    monkeypatch.setattr(socket, "getaddrinfo", several)
    assert post(f"http://several.example:{server.server_port}/", {}, HERE) == 204


def test_proxies_of_the_environment_are_ignored(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert post(server.url, {}, HERE) == 204


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://example.com", "file:///etc/passwd", "example.com", "", "http://", "http:///x", "https://[::1"),
        *("http://a:99999/", "http://a:b/", "http://user:secret@example.com/"),
    ],
)
def test_an_invalid_url_is_rejected_without_retry(url: str) -> None:
    with pytest.raises(GiveUp) as caught:
        post(url, {}, PUBLIC)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["\r\nHost: evil", "%0d%0aHost:evil", "\x00", " x"])
def test_a_url_cannot_inject_headers(server: Server, text: str) -> None:
    post(f"{server.url}/{text}", {}, HERE)
    (received,) = server.received
    assert received[1] == f"127.0.0.1:{server.server_port}"


def test_webhooks_can_be_disabled(server: Server) -> None:
    urls: dict[str, Any] = {"database_url": "postgresql://nowhere", "redis_url": "redis://nowhere"}
    off = Orchestrator(**urls, webhooks="off", webhook_allow="127.0.0.1")
    on = Orchestrator(**urls, webhook_allow="127.0.0.1")
    for app in (off, on):
        install(app)
    with pytest.raises(GiveUp, match="disabled"):
        off.tasks["orchestrator.webhook"].function(server.url, {})
    assert on.tasks["orchestrator.webhook"].function(server.url, {}) == 204
    with pytest.raises(ConfigurationError, match="Setting webhooks: expected public, allowed or off, found 'no'"):
        install(Orchestrator(**urls, webhooks="no"))
