"""The remote side of the executor `pull`: a client that polls the HTTP API for work, and counts jobs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx

from orchestrator.domain.executors.builtin import Pull
from orchestrator.domain.executors.options import ExecutorOptions
from tests.acceptance.executors.harness import AWAY, Harness, Services
from tests.acceptance.stack import Stack


class _Work:
    def __init__(self, work: dict[str, Any]) -> None:
        self.work = work
        self.input: dict[str, Any] = work["input"]
        self.ended = threading.Event()
        self.is_lost = False
        self.is_over = False


class PullHarness(Harness):
    """A client with two polling threads and one thread per job."""

    name = "pull"
    without = AWAY
    """Nothing connects to a pull client, so that it cannot be unreachable."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._works: list[_Work] = []
        self._let_go: dict[str, Any] = {}
        """Results of `hold` jobs that tests have let go, by job id."""
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    def prepare(self, services: Services) -> None:
        assert isinstance(services, Stack)
        self._http = httpx.Client(base_url=services.api(), timeout=40, limits=httpx.Limits(max_connections=None))
        for number in range(2):
            self._begin(self._poll, f"p-{number}")

    def options(self) -> ExecutorOptions:
        return Pull(service="work", lease=2.0)

    def started(self, id: str) -> int:
        return sum(work.input["id"] == id for work in list(self._works))

    def is_running(self, id: str) -> bool:
        return any(work.input["id"] == id and not work.is_over for work in list(self._works))

    def let_go(self, id: str, value: Any = None) -> None:
        self._let_go[id] = value
        for work in self._of(id):
            work.ended.set()

    def lose(self, id: str) -> None:
        for work in self._of(id):
            work.is_lost = True
            work.ended.set()

    def close(self) -> None:
        self._closed.set()
        for work in self._works:
            work.ended.set()
        for thread in self._threads:
            thread.join(10)
        self._http.close()

    def _of(self, id: str) -> list[_Work]:
        return [work for work in self._works if work.input["id"] == id]

    def _begin(self, call: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=call, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _poll(self, name: str) -> None:
        while not self._closed.is_set():
            poll_body = {"worker_id": name, "services": ["work"], "wait": 1}
            response = self._ask("poll", poll_body)
            if response is None:
                self._closed.wait(0.2)
            elif response.status_code == 200:
                work = _Work(response.json())
                self._works.append(work)
                self._begin(self._do, work)

    def _do(self, work: _Work) -> None:
        do, id = work.input["do"], work.work["queue_id"]
        outcome: dict[str, Any] = {"result": work.input.get("value")}
        if do == "hold":
            while work.input["id"] not in self._let_go and not work.ended.wait(0.3):
                response = self._ask("heartbeat", {"queue_id": id})
                if response is not None and response.status_code != 200:
                    break
            outcome = {"result": self._let_go.get(work.input["id"])}
        elif do == "fail":
            outcome = {"error": {"kind": "Failure", "message": work.input["message"]}}
        elif do == "say":
            lines = work.input["lines"]
            outcome = {"result": lines, "logs": [f"line {number}" for number in range(lines)]}
        elif do == "large":
            outcome = {"result": "x" * work.input["bytes"]}
        elif do == "garbage":
            outcome = {"result": "\0"}
        work.is_over = True
        if not (work.is_lost or self._closed.is_set()):
            self._ask("complete", {"queue_id": id, **outcome})

    def _ask(self, action: str, body: dict[str, Any]) -> httpx.Response | None:
        """Send a request; return None if the API is unreachable, as at the end of a test."""
        try:
            return self._http.post(f"/queue/{action}", json=body)
        except httpx.TransportError:
            return None
