"""Middleware in real workers: in threads, on the event loop, in child processes, around turns, and with executors."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import hooked
import pytest

from orchestrator import TaskFailed
from orchestrator.executors import Http
from tests.acceptance.stack import Stack
from tests.waiting import eventually

APP = ("--app", "hooked:app", "--allow-command", "/bin/sh")
application = hooked.app
SETTINGS = {"worker_ttl": 4.0, "heartbeat": 0.5, "webhook_allow": "127.0.0.1"}


class Notes:
    """The calls that the middleware has recorded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def of(self, name: str) -> list[Any]:
        """Return the recorded calls of a task or workflow."""
        found = [json.loads(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []
        return [[line[0], *line[2:]] for line in found if line[1] == name]

    def wait(self, name: str, *expected: list[Any]) -> None:
        eventually(lambda: self.of(name) == list(expected), f"{name}: {expected} in {self._path}", 30)


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[Notes]:
    """The recorded calls of one test, which acts for a tenant."""
    before = hooked.tenant.set("acme"), hooked.notes.set(str(tmp_path / "notes"))
    yield Notes(tmp_path / "notes")
    hooked.tenant.reset(before[0])
    hooked.notes.reset(before[1])


@pytest.fixture(scope="module")
def worker(leading: Stack) -> Stack:
    leading.worker(*APP)
    return leading


AROUND: list[Any] = [["enqueue", "acme"], ["before", 0, "acme"], ["after", "acme"], ["ended", "success", None]]


def test_middleware_runs_in_threads_and_on_the_event_loop(worker: Stack, notes: Notes) -> None:
    assert hooked.in_thread.enqueue().result(30) == "acme False"
    notes.wait("hooked.in_thread", *AROUND)
    assert hooked.on_loop.enqueue().result(30) == "acme"
    notes.wait("hooked.on_loop", *AROUND)


def test_middleware_runs_in_a_child_process_and_for_its_enqueues(worker: Stack, notes: Notes) -> None:
    assert hooked.apart.enqueue().result(60) == "acme"
    notes.wait("hooked.apart", *AROUND)
    notes.wait("hooked.in_thread", *AROUND)


def test_middleware_sees_a_failure_and_its_retry(worker: Stack, notes: Notes) -> None:
    with pytest.raises(TaskFailed):
        hooked.fails.enqueue().result(30)
    around: list[Any] = [["before", 0, "acme"], ["raised", "ValueError", "acme"], ["ended", "retry", "ValueError"]]
    again: list[Any] = [["before", 1, "acme"], ["raised", "ValueError", "acme"], ["ended", "failure", "ValueError"]]
    notes.wait("hooked.fails", ["enqueue", "acme"], *around, *again)


@pytest.mark.parametrize(("name", "raised"), [("sleeps", "TaskAborted"), ("sleeps_on_loop", "CancelledError")])
def test_middleware_sees_a_cancel(worker: Stack, notes: Notes, name: str, raised: str) -> None:
    handle = application.tasks[f"hooked.{name}"].enqueue()
    notes.wait("acme", ["began"])
    handle.cancel()
    ended: list[Any] = ["ended", "cancelled", "orchestrator.errors.TaskAborted"]
    notes.wait(f"hooked.{name}", ["enqueue", "acme"], ["before", 0, "acme"], ["raised", raised, "acme"], ended)


def test_middleware_sees_the_death_of_a_child_process(worker: Stack, notes: Notes) -> None:
    hooked.dies.enqueue().result(60)
    again: list[Any] = [["before", "after a loss", "acme"], ["after", "acme"], ["ended", "success", None]]
    lost: list[Any] = [["before", 0, "acme"], ["ended", "lost", "WorkerLost"]]
    notes.wait("hooked.dies", ["enqueue", "acme"], *lost, *again)


def test_a_dead_worker_process_calls_no_hook_until_the_next_attempt(worker: Stack, notes: Notes) -> None:
    hooked.takes_its_worker_along.enqueue().result(60)
    again: list[Any] = [["before", "after a loss", "acme"], ["after", "acme"], ["ended", "success", None]]
    notes.wait("hooked.takes_its_worker_along", ["enqueue", "acme"], ["before", 0, "acme"], *again)


def test_a_task_of_an_executor_has_only_enqueue_and_ended_hooks(worker: Stack, notes: Notes) -> None:
    with pytest.raises(TaskFailed):
        hooked.runs_elsewhere.enqueue().result(30)
    ends: list[Any] = [["ended", "retry", "ExitCode"], ["ended", "failure", "ExitCode"]]
    notes.wait("hooked.runs_elsewhere", ["enqueue", "acme"], *ends)
    with served() as url:
        remote = hooked.asks_elsewhere.options(executor=Http(service="echo", url=url), executor_options=None)
        assert remote.enqueue("hello").result(30) == "hello"
    notes.wait("hooked.asks_elsewhere", ["enqueue", "acme"], ["ended", "success", None])


@contextmanager
def served() -> Iterator[str]:
    """Serve a service that returns its input's word; yield the address."""

    class Echo(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps({"result": asked["input"]["word"], "error": ""}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_middleware_sees_live_and_replayed_turns(life: Stack, notes: Notes) -> None:
    victim = life.worker(*APP, "--queues", "turns")
    handle = hooked.waits.start()
    eventually(lambda: life.scalar("SELECT count(*) FROM orchestrator.promises"), "the promise is open", 30)
    live: list[Any] = [["enqueue", "acme"], ["turn", False, "acme"], ["turn", False, "acme"]]
    notes.wait("hooked.waits", *live)
    victim.kill()
    life.worker(*APP, "--queues", "turns")
    handle.resolve("go")
    assert handle.result(60) == ["acme"] * 4
    notes.wait("hooked.waits", *live, ["turn", True, "acme"], ["turn", False, "acme"])
    assert notes.of("hooked.on_loop") == AROUND[1:] * 2, "no hook is called where the code schedules a task"
