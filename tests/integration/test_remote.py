"""A client over HTTP with a problem: its API key, the connection to the server, or a server that is not ours."""

from __future__ import annotations

import base64
import http.client
import http.server
import json
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import msgspec
import pytest
from sqlalchemy import Engine, text

from orchestrator import (
    ConfigurationError,
    Duplicate,
    Forbidden,
    Handle,
    NotFound,
    Orchestrator,
    OrchestratorError,
    PayloadError,
    ResultTimeout,
    Settings,
    Task,
    Unavailable,
    Uncertain,
    WrongState,
)
from orchestrator.api import access
from orchestrator.domain.access import Scope, Secret
from orchestrator.domain.tasks.task import NewTask, TaskOptions, UniqueKey
from orchestrator.sdk.backend import Backend
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.remote import http as remote_http
from orchestrator.sdk.remote import waiting as remote_waiting
from orchestrator.sdk.values.payload import encode_call
from orchestrator.sealing import CALL, vault_of
from orchestrator.settings import load_settings
from orchestrator.store import keys
from tests.integration.api_client import bare_settings, empty_engine, make_key  # noqa: F401
from tests.integration.serving import serving
from tests.waiting import eventually

ID = "0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17"


@pytest.fixture
def api(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a server in this process, with a real database."""
    monkeypatch.setattr(access, "_KEY_TTL", 0.0)
    with serving(settings) as url:
        yield url


@contextmanager
def client(url: str, **settings: Any) -> Iterator[tuple[Orchestrator, Task[[int], int]]]:
    with Orchestrator(load_settings(environ={}), api_url=url, **settings) as app:

        @app.task(name="remote.double")
        def double(number: int) -> int:
            return 2 * number

        yield app, double


def count(engine: Engine) -> int:
    with engine.connect() as connection:
        found: int = connection.execute(text("SELECT count(*) FROM orchestrator.tasks")).scalar_one()
        return found


# -- API keys


def test_calls_need_the_scope_of_their_key_and_errors_hide_it(engine: Engine, api: str) -> None:
    key = make_key(engine, Scope.ENQUEUE)
    with client(api, api_key=str(key)) as (app, double):
        assert double.enqueue(2).status() == "pending"
        assert str(key) not in repr(app.settings)
        with pytest.raises(Forbidden, match="needs the scope operate") as refused:
            app.queue("mail").pause()
        assert key.secret not in str(refused.value)
    bound = make_key(engine, Scope.OPERATE, queues="bank.")
    with client(api, api_key=str(bound)) as (app, _), pytest.raises(Forbidden, match="begin with 'bank.'"):
        app.queue("mail").pause()


@pytest.mark.parametrize("key", ["", "nonsense", f"orc_{'0' * 12}_{'x' * 43}"])
def test_an_invalid_key_enqueues_nothing(engine: Engine, api: str, key: str) -> None:
    make_key(engine, Scope.ADMIN)
    with client(api, api_key=key) as (_, double), pytest.raises(ConfigurationError, match="setting api_key"):
        double.enqueue(2)
    assert count(engine) == 0


def test_revoking_the_key_ends_a_wait(engine: Engine, api: str) -> None:
    key, _ = make_key(engine, Scope.ENQUEUE), make_key(engine, Scope.ADMIN)
    with client(api, api_key=str(key)) as (_, double):
        handle = double.enqueue(2)
        with engine.connect() as connection:
            keys.revoke(connection, key.id)
        with pytest.raises(ConfigurationError, match="revoked"):
            handle.result(90)


# -- errors


def test_errors_keep_their_type_and_fields_over_http(engine: Engine, api: str) -> None:
    with client(api) as (app, double):
        first = double.options(unique_key="one", on_duplicate="raise").enqueue(1)
        with pytest.raises(Duplicate, match="already has the key") as duplicate:
            double.options(unique_key="one", on_duplicate="raise").enqueue(1)
        assert duplicate.value.task_id == first.id
        with pytest.raises(NotFound, match=ID) as missing:
            app.handle(ID).status()
        assert missing.value.sought == ("task", ID)
        with pytest.raises(NotFound, match=f"No task has the id {ID}"):
            app.handle(ID).result(20)
        with pytest.raises(NotFound, match=f"No run has the id {ID}"):
            app.run(ID).wait_ended(20)
        with pytest.raises(NotFound, match=f"No run has the id {ID}"):
            app.workflow_run(ID).result(20)
        with pytest.raises(WrongState, match="Cannot retry task"):
            first.retry()
        with pytest.raises(PayloadError, match="at most 1,000,000"):
            app.enqueue("remote.double", "x" * 1_000_001)
        assert first.progress() is None


def test_secrets_are_redacted_by_the_server(engine: Engine, settings: Settings) -> None:
    with serving(replace(settings, redact="password")) as url, client(url) as (app, _):

        @app.task(name="remote.login")
        def login(user: str, password: str) -> str:
            return user + password

        task = login.enqueue("ann", password="hunter22")
        seen = app._client.backend.insights.show_task(UUID(task.id))
        assert seen is not None
        assert b"ann" in seen.payload
        assert b"hunter22" not in seen.payload


def test_calls_that_need_the_database_say_so(engine: Engine, api: str) -> None:
    with (
        client(api) as (_, double),
        engine.connect() as connection,
        pytest.raises(ConfigurationError, match="enqueue_in needs the database"),
    ):
        double.enqueue_in(connection, 2)
    with pytest.raises(ConfigurationError, match="This needs direct access to Postgres and Redis"):
        load_settings(environ={}, api_url=api).require_database()


# -- the connection to the server


def test_an_unreachable_server_is_reported() -> None:
    with socket.socket() as taken:  # keeps the port unused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with client(url) as (app, double):
            with pytest.raises(Unavailable, match=f"The API at {url} cannot be reached"):
                double.enqueue(2)
            with pytest.raises(Exception, match=r"had no result after 0.2 s. The API cannot be reached"):
                app.handle(ID).result(0.2)


class LosingAnswers:
    """Forwards requests to the server, and loses the first answer of a path, or also the request."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        path: str,
        then: Callable[[], None] = lambda: None,
        said: remote_http.Reply | None = None,
        later: Exception | None = None,
        *,
        request_too: bool = False,
    ) -> None:
        self.asked: list[dict[str, Any]] = []
        post = remote_http.Http.post

        def lose(http: remote_http.Http, path_: str, body: bytes, *others: Any) -> remote_http.Reply:
            if later is not None and self.asked:
                raise later
            if path_ == path and request_too and not self.asked:
                self.asked.append(json.loads(body))
                raise remote_http.Broken("cut")
            reply = post(http, path_, body, *others)
            if path_ == path:
                self.asked.append(json.loads(body))
                if len(self.asked) == 1:
                    then()
                    if said is not None:
                        return said
                    raise remote_http.Broken("cut")
            return reply

        monkeypatch.setattr(remote_http.Http, "post", lose)


def test_a_task_whose_answer_was_lost_is_enqueued_once(
    engine: Engine, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = LosingAnswers(monkeypatch, "/api/v1/client/tasks/enqueue")
    with client(api) as (_, double):
        assert double.enqueue(2).status() == "pending"
    assert ["repeated" in request for request in lost.asked] == [False, True]
    assert count(engine) == 1


def test_an_ended_task_with_a_lost_answer_is_not_enqueued_again(
    engine: Engine, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    LosingAnswers(monkeypatch, "/api/v1/client/tasks/enqueue", lambda: end_all(engine))
    with client(api) as (_, double):
        assert double.enqueue(2).status() == "success"
    assert count(engine) == 0


def test_bulk_calls_with_a_lost_answer_are_stored_once(
    engine: Engine, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client(api) as (app, double):
        LosingAnswers(monkeypatch, "/api/v1/client/tasks/enqueue_many")
        assert len(app.enqueue_many(double, [(1,), (2,)])) == 2
        assert count(engine) == 2
        LosingAnswers(monkeypatch, "/api/v1/client/runs/start")
        assert app.start_many(double, [1, 2]).progress().counters.total == 2
        assert count(engine) == 4


def test_lost_bulk_requests_are_sent_again_completely(
    engine: Engine, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client(api) as (app, double):
        LosingAnswers(monkeypatch, "/api/v1/client/tasks/enqueue_many", request_too=True)
        assert len(app.enqueue_many(double, ((number,) for number in range(1_000)))) == 1_000
        assert count(engine) == 1_000
        LosingAnswers(monkeypatch, "/api/v1/client/runs/start", request_too=True)
        assert app.start_many(double, range(1_000)).progress().counters.total == 1_000
        assert count(engine) == 2_000


@pytest.mark.parametrize("status", [502, 503, 504])
@pytest.mark.parametrize("has_ended", [False, True])
def test_gateway_errors_of_a_proxy_lead_to_a_repeated_request(
    engine: Engine, api: str, monkeypatch: pytest.MonkeyPatch, status: int, has_ended: bool
) -> None:
    said = remote_http.Reply(status, "text/html", None, b"<h1>Gateway</h1>")
    then = partial(end_all, engine) if has_ended else lambda: None
    lost = LosingAnswers(monkeypatch, "/api/v1/client/tasks/enqueue", then, said)
    with client(api) as (_, double):
        assert double.enqueue(2).status() == ("success" if has_ended else "pending")
    assert ["repeated" in request for request in lost.asked] == [False, True]
    assert count(engine) == (0 if has_ended else 1)


def test_requests_delayed_by_a_proxy_are_not_applied_again(
    engine: Engine, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {
        path: LosingAnswers(monkeypatch, f"/api/v1/client/{path}") for path in ("tasks/enqueue_many", "runs/start")
    }
    calls["tasks/enqueue"] = LosingAnswers(monkeypatch, "/api/v1/client/tasks/enqueue")
    with client(api) as (app, double):
        double.enqueue(1)
        app.enqueue_many(double, [(1,), (2,)])
        app.start_many(double, [1, 2])
    assert count(engine) == 5
    for _ in ("open", "ended"):
        for path, lost in calls.items():
            late = httpx.post(f"{api}/api/v1/client/{path}", json=lost.asked[0], timeout=30)
            assert late.status_code == 200, (path, late.text)
        assert count(engine) in (5, 0)
        end_all(engine)
    assert count(engine) == 0
    id_, name, _, *rest = lost.asked[0]["task"]
    other = lost.asked[0] | {"task": [id_, name, "others", *rest]}
    assert httpx.post(f"{api}/api/v1/client/tasks/enqueue", json=other, timeout=30).status_code == 422


def test_a_failure_after_a_lost_answer_is_reported_as_uncertain(
    engine: Engine, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    LosingAnswers(monkeypatch, "/api/v1/client/tasks/enqueue", later=remote_http.Unreached("refused"))
    with client(api) as (_, double), pytest.raises(Uncertain, match="not known whether this was done") as raised:
        double.enqueue(2)
    assert isinstance(raised.value.__cause__, Unavailable)
    assert count(engine) == 1


def test_a_call_that_must_not_repeat_is_sent_once(engine: Engine, api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = LosingAnswers(monkeypatch, "/api/v1/client/workflows/post_event")
    with client(api) as (app, _), pytest.raises(Uncertain, match="it is not known whether this was done"):
        app.post_event("arrived")
    assert len(lost.asked) == 1


def end_all(engine: Engine) -> None:
    """Move all tasks to the ended tasks, like a leader after their success."""
    columns = "id, seq, name, queue, payload, created_at, attempt, priority, failures, losses"
    with engine.begin() as connection:
        connection.exec_driver_sql(
            f"WITH gone AS (DELETE FROM orchestrator.tasks RETURNING {columns}) "
            f"INSERT INTO orchestrator.ended_tasks ({columns}, status, ended_at) SELECT {columns}, 'success', now() "
            f"FROM gone"
        )


def test_a_repeated_enqueue_tolerates_a_task_stored_meanwhile(
    engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Backend(settings)
    task = NewTask(new_id(), "remote.double", "default", encode_call("remote.double", [1], {}, 1_000))
    assert backend.tasks.enqueue(task) == task.id
    assert backend.tasks.enqueue(task, repeated=True) == task.id
    assert count(engine) == 1
    end_all(engine)
    looks, were_sent = iter([False]), backend.tasks._were_sent
    monkeypatch.setattr(backend.tasks, "_were_sent", lambda tasks: next(looks, None) is None and were_sent(tasks))
    assert backend.tasks.enqueue(task, repeated=True) == task.id
    assert count(engine) == 0
    backend.close()


def test_the_server_drops_the_wait_of_a_disconnected_client(engine: Engine, settings: Settings) -> None:
    with serving(settings) as url:
        with client(url) as (_, double):
            task = UUID(double.enqueue(2).id).bytes
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        connection.request("POST", "/api/v1/waits", msgspec.json.encode({"tasks": [task], "timeout": 60}))
        connection.close()
        left = time.monotonic()
    assert time.monotonic() - left < 30, "the server has waited for somebody who is gone"


def test_a_wait_continues_when_the_application_is_closed_and_reused(engine: Engine, api: str) -> None:
    with client(api) as (app, double), ThreadPoolExecutor(1) as pool:
        handle = double.enqueue(2)
        waiting = pool.submit(handle.result, 90)
        app.close()
        end_all(engine)
        assert handle.result(90) is None
        assert waiting.result(90) is None


def _timeout_message(handle: Handle[Any]) -> str:
    with pytest.raises(ResultTimeout) as late:
        handle.result(0.1)
    return str(late.value)


def test_a_wait_reports_that_no_scheduler_leads(
    engine: Engine, api: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_waiting, "_LONG", 0.5)
    with client(api) as (_, double), ThreadPoolExecutor(1) as pool:
        handle = double.enqueue(2)
        waiting = pool.submit(handle.result, 90)
        eventually(lambda: "No scheduler leads" in caplog.text, "it is told")
        eventually(
            lambda: "No scheduler leads" in _timeout_message(handle), "an overdue result says so"
        )  # a busy API may not
        end_all(engine)
        assert waiting.result(90) is None


def test_a_certificate_is_trusted_only_with_its_ca_file(settings: Settings, tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(["openssl", *words, *names], check=True, capture_output=True)
    with serving(settings, ssl_keyfile=key, ssl_certfile=certificate) as url:
        with client(url) as (_, double), pytest.raises(ConfigurationError, match="cannot be trusted.*api_ca_file"):
            double.enqueue(2)
        with client(url, api_ca_file=certificate) as (_, double):
            assert double.enqueue(2).status() == "pending"
        with client(url, api_ca_file=key) as (_, double), pytest.raises(ConfigurationError, match="api_ca_file"):
            double.enqueue(2)


def test_https_to_a_server_without_tls_is_rejected(api: str) -> None:
    url = api.replace("http:", "https:")
    with client(url) as (_, double), pytest.raises(ConfigurationError, match="does not speak TLS.*http://"):
        double.enqueue(2)


def test_connection_and_key_errors_name_setting_and_remedy(engine: Engine, api: str) -> None:
    small = make_key(engine, Scope.READ)
    with client(api) as (_, double), pytest.raises(ConfigurationError) as none:
        double.enqueue(2)
    with (
        client(api, api_key=str(Secret(small.id, "x" * 43))) as (_, double),
        pytest.raises(ConfigurationError) as wrong,
    ):
        double.enqueue(2)
    with client(api, api_key=str(small)) as (_, double), pytest.raises(Forbidden) as less:
        double.enqueue(2)
    with client("http://127.0.0.1:1") as (_, double), pytest.raises(Unavailable) as away:
        double.enqueue(2)
    assert "setting api_key is not set" in str(none.value)
    assert f"refuses setting api_key: The key {small.id} is not valid" in str(wrong.value)
    assert f"needs the scope enqueue, and key {small.id} (test) has read" in str(less.value)
    for error in (none, wrong, less):
        assert "ORCHESTRATOR_API_KEY" in str(error.value)
        assert "orchestrator keys create" in str(error.value)
        assert api in str(error.value)
    assert "http://127.0.0.1:1 cannot be reached: [Errno 111]" in str(away.value)
    assert "ORCHESTRATOR_API_URL" in str(away.value)


# -- other servers


def test_an_api_url_with_a_path_is_rejected(api: str) -> None:
    with client(f"{api}/api/v1/") as (_, double), pytest.raises(ConfigurationError, match="without /api/v1"):
        double.enqueue(2)


@contextmanager
def static_server(status: int, content_type: str, body: bytes, **headers: str) -> Iterator[tuple[str, list[str]]]:
    """A server that gives the same answer to every request."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(self.path)
            self.send_response(status)
            for name, value in {"Content-Type": content_type, "Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()
        thread.join()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_has_connections_of_its_own() -> None:
    used: list[tuple[str, int]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            used.append((self.path, self.client_address[1]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        line = remote_http.Http(Settings(api_url=f"http://127.0.0.1:{server.server_address[1]}"))
        line.post("/parent", b"{}", 30.0)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                line.post("/child", b"{}", 30.0)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        line.post("/parent", b"{}", 30.0)
        line.close()
        server.shutdown()
        thread.join()
    (_, first), (_, other), (_, last) = used
    assert [path for path, _ in used] == ["/parent", "/child", "/parent"]
    assert first == last != other


@pytest.mark.parametrize(
    ("status", "content_type", "body", "kind", "words"),
    [
        (200, "text/html", b"<html>", ConfigurationError, "is not the API of an orchestrator"),
        (200, "application/json", b'{"name": "another"}', OrchestratorError, "cannot be decoded"),
        (404, "text/html", b"", ConfigurationError, "status 404 and text/html"),
        (
            404,
            "application/problem+json",
            b'{"title": "Not found", "status": 404}',
            OrchestratorError,
            "a different rele",
        ),
        (
            409,
            "application/problem+json",
            b'{"title": "New", "status": 409, "detail": "x", "type": "urn:orchestrator:error:Unheard"}',
            OrchestratorError,
            r"refuses this \(New\): x",
        ),
        (
            422,
            "application/problem+json",
            b'{"title": "Misfit", "status": 422, "detail": "#/repeated: unknown field"}',
            OrchestratorError,
            "unknown field",
        ),
        (
            413,
            "application/problem+json",
            b'{"title": "The body is too large", "status": 413, "detail": "At most 9 bytes are read here."}',
            PayloadError,
            "too large.*At most 9 bytes",
        ),
    ],
)
def test_unexpected_responses_are_reported(
    status: int, content_type: str, body: bytes, kind: type[Exception], words: str
) -> None:
    with static_server(status, content_type, body) as (url, asked), client(url) as (_, double):
        with pytest.raises(kind, match=words):
            double.enqueue(2)
        assert len(asked) == 1


def test_unknown_fields_of_a_newer_server_are_ignored() -> None:
    with (
        static_server(200, "application/json", b'{"result": "running", "since": 7}') as (url, _),
        client(url) as (app, _),
    ):
        assert app.handle(ID).status() == "running"


def test_a_busy_server_is_retried_as_its_header_says() -> None:
    problem = b'{"title": "Busy", "status": 503, "detail": "no connection left"}'
    with (
        static_server(503, "application/problem+json", problem, Retry_After="0") as (url, asked),
        client(url) as (_, double),
    ):
        with pytest.raises(Unavailable, match="no connection left"):
            double.enqueue(2)
        assert len(asked) == 4


# -- requests that our clients never send


def hostile_tasks() -> Iterator[NewTask]:
    good = NewTask(new_id(), "remote.double", "default", encode_call("remote.double", [1], {}, 1_000))
    change = msgspec.structs.replace
    yield change(good, id=b"short")
    yield change(good, name="orchestrator.start_run")
    yield change(good, name="no name\n")
    yield change(good, queue="")
    yield change(good, payload=b"\xff")
    yield change(good, payload=b"\x90")
    yield change(good, payload=b"x" * 1_000_001)
    yield change(good, priority=2**40)
    yield change(good, delay=-1.0)
    yield change(good, delay=1e300)
    yield change(good, expires=1e300)
    yield change(good, options="[")
    yield change(good, options=msgspec.json.encode(TaskOptions(weight=0.0)).decode())
    yield change(good, options=msgspec.json.encode(TaskOptions(concurrency=-3)).decode())
    yield change(good, run_id=new_id(), position=3)
    yield change(good, step="a")
    yield change(good, lane="another|task")
    yield change(good, unique=UniqueKey("k" * 5_000, "pending"))
    yield change(good, callbacks="{}")


@pytest.mark.parametrize("number", range(len(list(hostile_tasks()))))
def test_tasks_with_invalid_fields_are_rejected(engine: Engine, api: str, number: int) -> None:
    task = list(hostile_tasks())[number]
    connection = http.client.HTTPConnection(api.removeprefix("http://"))
    for name, given in (("enqueue", {"task": task}), ("enqueue_many", {"tasks": [task]})):
        connection.request("POST", f"/api/v1/client/tasks/{name}", msgspec.json.encode(given))
        answer = connection.getresponse()
        assert answer.status == 422, answer.read()
        answer.read()
    connection.close()
    assert count(engine) == 0


@pytest.mark.parametrize("given", [{"key": "k" * 5_000}, {"key": "k\n"}, {"tags": ["t"] * 1_000}, {"tags": ["\x00"]}])
def test_flow_runs_with_invalid_keys_or_tags_are_rejected(engine: Engine, api: str, given: dict[str, Any]) -> None:
    definition = {"start": "a", "nodes": {"a": {"service": "s"}}}
    assert httpx.post(f"{api}/api/v1/flows/hostile", json={"definition": definition}).is_success
    body = {"name": "hostile", "params": {}, "run_id": base64.b64encode(new_id()).decode(), **given}
    answer = httpx.post(f"{api}/api/v1/client/flows/start", json=body)
    assert answer.status_code == 422, answer.text
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM orchestrator.runs")) == 0


def test_the_server_accepts_payloads_that_it_cannot_decrypt(engine: Engine, api: str) -> None:
    pytest.importorskip("cryptography")
    key = base64.b64encode(secrets.token_bytes(32)).decode()
    vault = vault_of(Settings(data_keys=f"remote-a:{key}"))
    assert vault is not None
    sealed = vault.seal(CALL, encode_call("remote.double", [1], {}, 1_000))
    unknown = sealed[:-1] + bytes([sealed[-1] ^ 1])  # as if sealed with a key that the server lacks
    connection = http.client.HTTPConnection(api.removeprefix("http://"))
    task = NewTask(new_id(), "remote.double", "default", unknown)
    connection.request("POST", "/api/v1/client/tasks/enqueue", msgspec.json.encode({"task": task}))
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    answer.read()
    connection.close()
    assert count(engine) == 1


def test_filter_times_are_sent_to_the_server(engine: Engine, api: str) -> None:
    with client(api) as (app, double):
        double.enqueue(2)
        assert app.retry_failed(name="remote.double", since=datetime(2024, 1, 1, tzinfo=UTC)) == 0
