"""No request blocks the event loop: every route gets its most expensive input, timed by the loop's own thread."""

from __future__ import annotations

import asyncio
import gc
import secrets
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar, get_args
from uuid import UUID, uuid4

import httpx
import msgspec
import pytest
import uvicorn
from sqlalchemy import Engine

from orchestrator.api.app import create_app
from orchestrator.api.bodies import MAX_CONTAINERS, MAX_SMALL_REQUEST, MAX_VALUES, SMALL_BODY
from orchestrator.api.dashboard.paths import PAGES
from orchestrator.api.endpoints import Endpoint
from orchestrator.api.http_protocol import TimedProtocol
from orchestrator.api.routes import ROUTES
from orchestrator.domain.access import Secret
from orchestrator.sdk.ids import new_id
from orchestrator.settings import load_settings
from orchestrator.store.database import engine_for
from tests.integration.api_client import make_key
from tests.waiting import eventually

T = TypeVar("T")
_LONGEST = 0.05
"""CPU seconds that one callback of the event loop may take."""
_OBJECTS = b'{"a":1},' * (MAX_CONTAINERS - 100)
_SMALLER = msgspec.Raw(b"[" + _OBJECTS + b"0]")
_LARGER = msgspec.Raw(b"[" + _OBJECTS + b'"abcdefgh",' * (MAX_VALUES - MAX_CONTAINERS - 100) + b"0]")
"""The slowest value to decode: as many objects, and as many values, as a body may have."""


class Loop:
    """The slowest callbacks of the server's event loop, in CPU time of its thread: other load does not count."""

    def __init__(self) -> None:
        self.thread: int | None = None
        self.longest, self.what = 0.0, ""

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = asyncio.events.Handle._run

        def timed(handle: asyncio.events.Handle) -> None:
            if threading.get_ident() != self.thread:
                return run(handle)
            began = time.thread_time()
            run(handle)
            took = time.thread_time() - began
            if took > self.longest:
                self.longest, self.what = took, repr(handle)

        monkeypatch.setattr(asyncio.events.Handle, "_run", timed)

    def serves(self, asked: str, ask: Callable[[], T]) -> T:
        """Return the answer; fail if all three tries blocked the loop. In one, the machine may have paused."""
        for _ in range(3):
            self.longest = 0.0
            answer = ask()
            if self.longest < _LONGEST:
                return answer
        raise AssertionError(f"{asked} held the event loop for {self.longest * 1000:.0f} ms: {self.what}")


@pytest.fixture(scope="module")
def engine(database_url: str) -> Iterator[Engine]:
    engine = engine_for(database_url, autocommit=True)
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def key(engine: Engine) -> Secret:
    return make_key(engine)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    found = Loop()
    found.patch(monkeypatch)
    return found


@pytest.fixture
def port(loop: Loop, database_url: str, redis_url: str) -> Iterator[int]:
    settings = load_settings(environ={}, database_url=database_url, redis_url=redis_url)
    config = uvicorn.Config(
        create_app(settings), port=0, log_config=None, http=TimedProtocol, ws="none", loop="asyncio"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    gc.freeze()  # garbage of earlier tests is not the server's
    gc.disable()
    thread.start()
    try:
        eventually(lambda: server.started, "it serves")
        loop.thread = thread.ident
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(60)
        gc.enable()
        gc.unfreeze()


@pytest.fixture
def client(port: int, key: Secret) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=f"http://localhost:{port}", headers=headers, timeout=120) as client:
        yield client


def _path(endpoint: Endpoint) -> str:
    path = endpoint.path
    for name, kind in endpoint.path_params.items():
        word = str(uuid4()) if kind is UUID else "1" if int in (kind, *get_args(kind)) else "x"
        path = path.replace(f"{{{name}}}", word).replace(f"{{{name}:path}}", word)
    return path


def _is_open(kind: Any) -> bool:
    """Return whether a field may hold any data."""
    return kind is Any or any(_is_open(one) for one in get_args(kind))


def _body(endpoint: Endpoint) -> bytes:
    """Return the example body, with the first field that may hold any data as large as allowed."""
    known = dict(endpoint.examples[0]) if endpoint.examples else {}
    if isinstance(endpoint.body, type) and issubclass(endpoint.body, msgspec.Struct):
        wide = [one.encode_name for one in msgspec.structs.fields(endpoint.body) if _is_open(one.type)][:1]
    else:
        wide = ["definition"]
    large = _SMALLER if endpoint.max_body == MAX_SMALL_REQUEST else _LARGER
    return msgspec.json.encode(dict.fromkeys(wide, large) | {name: known[name] for name in known if name not in wide})


_WORST: dict[str, Any] = {
    "/api/v1/tasks/bulk": {"tasks": [{"name": "t.a", "args": [1, {"a": [2]}], "kwargs": {"b": "c"}}] * 10_000},
    "/api/v1/waits": {"tasks": [b64encode(new_id()).decode() for _ in range(5_000)], "timeout": 0},
    "/api/v1/workflows/validate": {
        "definition": {"name": "a", "tasks": {f"t{i}": {"task": "t.a"} for i in range(9_900)}}
    },
    "/api/v1/flows/validate": {
        "definition": {
            "start": "n0",
            "nodes": {f"n{i}": {"kind": "timer", "params": {"delay_ms": 1}} for i in range(9_900)},
            "edges": [{"from": f"n{i}", "to": f"n{i + 1}"} for i in range(9_899)],
        }
    },
    "/queue/poll": {"worker_id": "w", "services": ["s"], "wait": 0},
}


@pytest.mark.long  # every route
def test_no_route_blocks_the_event_loop(client: httpx.Client, loop: Loop) -> None:
    for endpoint in ROUTES:
        path, method = _path(endpoint), "HEAD" if endpoint.is_live else endpoint.method
        asked = f"{endpoint.method} {endpoint.path}"
        content = None
        if endpoint.body is not None:
            worst = _WORST.get(endpoint.path)
            content = _body(endpoint) if worst is None else msgspec.json.encode(worst)
        answer = loop.serves(asked, partial(client.request, method, path, content=content))
        assert answer.status_code != 500, (asked, answer.text)
        assert answer.is_success or endpoint.path not in _WORST, (asked, answer.text)


@pytest.mark.long  # every page
def test_no_page_blocks_the_event_loop(client: httpx.Client, loop: Loop) -> None:
    token = secrets.token_urlsafe(24)
    lists = "%5B" + "%5B%5D%2C" * 60_000 + "%5B%5D%5D"
    form = f"token={token}&value={lists}&params={lists[:99]}".encode()
    sent = {"Content-Type": "application/x-www-form-urlencoded", "Cookie": f"orchestrator_form={token}"}
    for endpoint in PAGES:
        method = "HEAD" if endpoint.is_live else endpoint.method
        is_small = endpoint.path.endswith(("/login", "/logout"))
        content = None if method != "POST" else form[:SMALL_BODY] if is_small else form
        asked = partial(client.request, method, _path(endpoint), content=content, headers=sent)
        answer = loop.serves(f"{method} {endpoint.path}", asked)
        assert answer.status_code != 500, (endpoint.path, answer.text)


def test_a_body_with_too_many_values_is_rejected_before_decoding(client: httpx.Client, loop: Loop) -> None:
    lists = b"[" + b"[]," * 2_000_000 + b"[]]"
    for path, data in {"/api/v1/tasks": b'{"name":"t.a","args":' + lists + b"}", "/workflows": lists}.items():
        answer = loop.serves(path, partial(client.post, path, content=data))
        assert (answer.status_code, answer.json()["title"]) == (413, "The body is too large")
    answer = client.post("/api/v1/workflows/validate", content=lists)
    assert (answer.status_code, "1,000,000 bytes" in answer.text) == (413, True), answer.text


def test_large_responses_do_not_block_the_event_loop(client: httpx.Client, engine: Engine, loop: Loop) -> None:
    task = UUID(bytes=new_id())
    payload = msgspec.msgpack.encode([[[0.1234567] * 1_000_000], {}])
    with engine.connect() as connection:
        connection.exec_driver_sql(
            "INSERT INTO orchestrator.tasks (id, name, queue, payload) VALUES (%s, 't.a', 'lag', %s)",
            (task.hex, payload),
        )
    answer = loop.serves("large arguments", partial(client.get, f"/api/v1/tasks/{task}/arguments"))
    assert (answer.status_code, len(answer.content) > 8_000_000) == (200, True), answer.text[:300]
    with engine.connect() as connection:
        connection.exec_driver_sql("DELETE FROM orchestrator.tasks WHERE id = %s", (task.hex,))


def _send(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as link:
        link.sendall(data)
        return link.recv(100)


_HOST = b"Host: localhost\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


_UNKNOWN: dict[str, tuple[bytes, int]] = {
    "form": (b"POST /ui/login HTTP/1.1\r\n" + _HOST + _CHUNKED + b"400000\r\na=" + b"%41" * 25_000, 413),
    "announced form": (b"POST /ui/login HTTP/1.1\r\n" + _HOST + b"Content-Length: 70000\r\n\r\n", 413),
    "small form": (
        b"POST /ui/login HTTP/1.1\r\n" + _HOST + _CHUNKED + b"f000\r\na=" + b"%41" * 20_479 + b"a\r\n0\r\n\r\n",
        403,
    ),
    "cookie": (b"GET /ui/login HTTP/1.1\r\n" + _HOST + b'Cookie: a="' + b"\\1" * 30_000 + b'"\r\n\r\n', 200),
    "query": (b"GET /ui/login?to=" + b"%" * 60_000 + b" HTTP/1.1\r\n" + _HOST + b"\r\n", 414),
    "path": (b"GET " + b"/" * 15_900 + b" HTTP/1.1\r\n" + _HOST + b"\r\n", 404),
    "long path": (b"GET /api/v1/tasks/" + b"%41" * 20_000 + b" HTTP/1.1\r\n" + _HOST + b"\r\n", 414),
    "escaped path": (b"GET /api/v1/tasks/" + b"%41" * 5_300 + b" HTTP/1.1\r\n" + _HOST + b"\r\n", 401),
    "key": (
        b"GET /api/v1/tasks HTTP/1.1\r\n" + _HOST + b"Authorization: Bearer " + b"orc_" * 15_000 + b"\r\n\r\n",
        401,
    ),
    "header": (b"GET /healthz HTTP/1.1\r\n" + _HOST + b"If-None-Match: " + b'"a",' * 15_000 + b"\r\n\r\n", 200),
    "pipelined": ((b"GET /healthz HTTP/1.1\r\n" + _HOST + b"\r\n") * 5_000, 200),
}
"""Requests without a key, and the response's status."""


def test_nothing_expensive_happens_before_authentication(port: int, key: Secret, loop: Loop) -> None:
    del key  # a key exists, so that requests need one
    for name, (sent, status) in _UNKNOWN.items():
        assert loop.serves(name, partial(_send, port, sent)).startswith(b"HTTP/1.1 %d" % status), name
