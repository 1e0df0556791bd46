"""What the conformance suite of pull clients runs on: a system, the client as a process, a proxy between."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from orchestrator.domain.executors.builtin import Pull
from orchestrator.errors import TaskFailed
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.tasks.handle import Handle
from orchestrator.testing.executor_stage import LocalServices
from orchestrator.testing.executor_tasks import APP, declare
from orchestrator.testing.pull_proxy import Body, Exchange, Fault, RecordingProxy, ask
from orchestrator.testing.waiting import eventually

SERVICE = "conformance"
LEASE = 3.0
"""Seconds of a lease, where nothing else is said."""
SOON = 60.0
"""Seconds within which anything happens, on a busy machine too."""


class Trial:
    """A client under test, and the system that it works for."""

    def __init__(self, services: LocalServices, command: Sequence[str], folder: Path) -> None:
        self.services = services
        self._command = command
        self._log = folder / "client.log"
        self._app = Orchestrator(services.settings)
        self._work, _ = declare(self._app)
        services.scheduler()
        services.worker("--app", APP)
        self.key = services.run("keys", "create", "conformance", "--scope", "operate")
        self._api, self.address = services.api()
        self.proxy = RecordingProxy(self.address)
        self._client: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[bytes]] = []

    # -- the client

    def client(self) -> subprocess.Popen[bytes]:
        """Return the client, which is started if it does not run."""
        if self._client is None or self._client.poll() is not None:
            self._client = self.start()
        return self._client

    def start(self, **environment: str) -> subprocess.Popen[bytes]:
        """Start another client."""
        given = {
            "ORCHESTRATOR_API_URL": self.proxy.url,
            "ORCHESTRATOR_API_KEY": self.key,
            "CONFORMANCE_CONCURRENCY": "1",
            "CONFORMANCE_DRAIN": "30",
            **environment,
        }
        with self._log.open("ab") as output:
            client = subprocess.Popen(
                self._command, env={**os.environ, **given}, stdout=output, stderr=output, start_new_session=True
            )
        self._started.append(client)
        return client

    def stop(self) -> None:
        """Kill all clients that run."""
        for client in self._started:
            if client.poll() is None:
                kill(client)

    # -- work

    def enqueue(self, do: str, *, lease: float = LEASE, service: str = SERVICE, **more: Any) -> Work:
        """Enqueue work; options of the task begin with `task_`."""
        options = {name.removeprefix("task_"): more.pop(name) for name in list(more) if name.startswith("task_")}
        id = uuid4().hex[:8]
        task = self._work.options(executor=Pull(service=service, lease=lease), **options)
        return Work(self, id, task.enqueue(do=do, id=id, **more))

    def begun(self, do: str, **more: Any) -> Work:
        """Enqueue work; return when the client has it."""
        work = self.enqueue(do, **more)
        work.wait_for("poll")
        return work

    def ask(self, what: str, **body: Any) -> tuple[int, Body]:
        """Send a request to the API itself, as another client does."""
        return ask(f"{self.address}/queue/{what}", body, self.key)

    def stop_api(self) -> None:
        self._api.stop()

    def start_api(self) -> None:
        self._api, _ = self.services.api(urlsplit(self.address).port or 0)

    @contextmanager
    def faults(self, fault: Callable[[str, Body], Fault | None]) -> Iterator[None]:
        """Break some requests for as long as the block lasts."""
        before, self.proxy.fault = self.proxy.fault, fault
        try:
            yield
        finally:
            self.proxy.fault = before

    def log_end(self) -> str:
        """Return the end of what the client has written."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-2_000:] if self._log.exists() else ""

    def close(self) -> None:
        self.stop()
        self.proxy.close()
        self._app.close()


class Work:
    """One task that the client is to do."""

    def __init__(self, trial: Trial, id: str, handle: Handle[Any]) -> None:
        self._trial = trial
        self._id = id
        self.handle = handle

    def result(self) -> Any:
        return self.handle.result(SOON)

    def failure(self) -> TaskFailed:
        try:
            found = self.result()
        except TaskFailed as error:
            return error
        raise AssertionError(f"expected a failure, found the result {found!r:.100}")

    def all(self, what: str) -> list[Exchange]:
        """Return the exchanges of one kind about this work."""
        exchanges = list(self._trial.proxy.exchanges)
        polls = [one for one in exchanges if one.what == "poll" and self._is_in(one.answered.get("input"))]
        if what == "poll":
            return polls
        ids = {one.answered["queue_id"] for one in polls}
        return [one for one in exchanges if one.what == what and one.asked.get("queue_id") in ids]

    def wait_for(self, what: str, count: int = 1, *, status: int | None = None) -> Exchange:
        """Wait for an exchange, with this status; return the last."""

        def found() -> Exchange | None:
            some = [one for one in self.all(what) if status is None or one.status == status]
            return some[-1] if len(some) >= count else None

        wanted = what if status is None else f"{what} with status {status}"
        return eventually(found, f"{count} times {wanted}", SOON)

    def _is_in(self, given: Any) -> bool:
        return isinstance(given, dict) and given.get("id") == self._id


def kill(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(SOON)


def expect(found: Any, expected: Any, what: str) -> None:
    if found != expected:
        raise AssertionError(f"{what}: expected {expected!r:.200}, found {found!r:.200}")


def pass_time(seconds: float) -> None:
    """Let time pass, in which nothing is to happen."""
    until = time.monotonic() + seconds
    eventually(lambda: time.monotonic() > until, "time passes", seconds + SOON)
