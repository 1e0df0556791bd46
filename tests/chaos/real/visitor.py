"""A client of the HTTP API that retries each enqueue with the same idempotency key until it is acknowledged.

An acknowledged task exists and ends, and there is one task per key: the task's argument is the key.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from itertools import count
from random import Random

import httpx

from tests.chaos.real.arena import Arena
from tests.chaos.real.journal import append
from tests.chaos.real.project.tasks import work_for

_INTERVAL = 0.05
_TIMEOUT = 3.0
_STOP_TIMEOUT = 30.0
_RETRYABLE = {429, 503}
"""HTTP statuses that are valid during an outage. Any other error is a defect."""


class Visitor:
    """Enqueues tasks over HTTP in a thread."""

    def __init__(self, arena: Arena, seed: int) -> None:
        self._arena = arena
        self._random = Random(f"{seed} visitor")
        self._keys = count(1)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="visitor", daemon=True)
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Enqueue nothing new, but keep retrying the unacknowledged task."""
        self._stopping.set()

    def close(self) -> None:
        """Stop the thread. Call this after healing, when the last task must have been acknowledged."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT)
            if self._thread.is_alive():
                self.violations.append("somebody who enqueued over HTTP was never answered")

    def _run(self) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{self._arena.api_port}", timeout=_TIMEOUT) as client:
            while not self._stopping.wait(_INTERVAL):
                self._enqueue(client, f"key-{next(self._keys)}")

    def _enqueue(self, client: httpx.Client, key: str) -> None:
        call = {"name": work_for.name, "args": [key, self._random.choice((0.0, 0.0, 0.05))]}
        pause = threading.Event()
        while True:
            try:
                response = client.post("/api/v1/tasks", json=call, headers={"Idempotency-Key": key})
            except httpx.HTTPError:
                self.counts["over_http unanswered"] += 1
            else:
                if response.status_code == 201:
                    append(self._arena.journal.commit_log, "task", response.json()["id"])
                    self.counts["over_http"] += 1
                    if self._random.random() < 0.1:
                        self._ask_again(client, key, call, response.json()["id"])
                    return
                if response.status_code not in _RETRYABLE:
                    self.violations.append(
                        f"who enqueued over HTTP was answered {response.status_code}: {response.text:.300}"
                    )
                    return
                self.counts["over_http refused"] += 1
            pause.wait(0.1)

    def _ask_again(self, client: httpx.Client, key: str, call: Mapping[str, object], task: str) -> None:
        """Repeat an acknowledged enqueue: it must return the same task."""
        try:
            response = client.post("/api/v1/tasks", json=call, headers={"Idempotency-Key": key})
        except httpx.HTTPError:
            return
        if response.status_code == 201 and response.json()["id"] != task:
            self.violations.append(f"key {key} was task {task}, and is now {response.json()['id']}")
