"""Pull clients, which have only the HTTP API: they poll for tasks, send heartbeats and report completions.

The journal records each start, each acknowledged heartbeat and each end. Some lease holders die without notice.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from random import Random
from typing import Any

import httpx

from tests.chaos.real.arena import Arena
from tests.chaos.real.journal import append
from tests.chaos.real.project.pulls import LEASE, SERVICE

_POLLERS = 3
_TIMEOUT = 3.0
"""Timeout of a request in seconds. A completion may wait longer, as long as the API allows."""
_COMPLETION_TIMEOUT = 25.0
_HEARTBEAT_INTERVAL = LEASE / 8
_DEATH_PROBABILITY = 0.05
"""Probability that a lease holder dies."""
_RETRYABLE = {429, 503}
"""HTTP statuses that are valid during an outage."""
NOT_YET = "It is not known yet"
"""Title of the error for a lease that is not known yet; its holder continues."""


class Puller:
    """Polls in several threads, and works on each task in its own thread."""

    def __init__(self, arena: Arena, seed: int) -> None:
        self._arena = arena
        self._random = Random(f"{seed} puller")
        self._stopping = threading.Event()
        self._pollers = [threading.Thread(target=self._poll, args=(n,), daemon=True) for n in range(_POLLERS)]
        self._holders: list[threading.Thread] = []
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []

    def start(self) -> None:
        limits = httpx.Limits(max_connections=None)
        base = f"http://127.0.0.1:{self._arena.api_port}"
        self._http = httpx.Client(base_url=base, timeout=_TIMEOUT, limits=limits)
        for poller in self._pollers:
            poller.start()

    def close(self) -> None:
        """Stop; call this at rest, when all holders must have received a response."""
        self._stopping.set()
        if not self._pollers[0].is_alive():
            return
        until = time.monotonic() + _COMPLETION_TIMEOUT
        for thread in (*self._pollers, *self._holders):
            thread.join(max(0.0, until - time.monotonic()))
        if any(holder.is_alive() for holder in self._holders):
            self.violations.append("somebody who completed pulled work was never answered")
        self._http.close()

    def _poll(self, number: int) -> None:
        poll_body = {"worker_id": f"puller-{number}", "services": [SERVICE], "wait": 1}
        while not self._stopping.is_set():
            response = self._ask("poll", poll_body, (200, 204))
            if response is None:
                self._stopping.wait(0.1)
            elif response.status_code == 200:
                work = response.json()
                dies = self._random.random() < _DEATH_PROBABILITY
                holder = threading.Thread(target=self._hold, args=(work, dies), daemon=True)
                self._holders.append(holder)
                self._write("pulled", work["request_id"], work["task_id"], work["queue_id"], time.monotonic())
                self.counts["pulls"] += 1
                holder.start()

    def _hold(self, work: dict[str, Any], dies: bool) -> None:
        queue_id, seconds = work["queue_id"], work["input"]["seconds"]
        until = time.monotonic() + seconds
        while (remaining := until - time.monotonic()) > 0:
            if dies and remaining < seconds / 2:
                self._write("let-go", queue_id, time.monotonic(), "died")
                return
            sent = time.monotonic()
            response = self._ask("heartbeat", {"queue_id": queue_id}, (200, 409))
            if response is not None and response.status_code == 409:
                self._write("let-go", queue_id, time.monotonic(), "409")
                return
            if response is not None:
                self._write("heard", queue_id, sent)
            time.sleep(min(_HEARTBEAT_INTERVAL, max(0.0, remaining)))
        while True:
            sent = time.monotonic()
            completion = {"queue_id": queue_id, "result": queue_id}
            response = self._ask("complete", completion, (200, 409), _COMPLETION_TIMEOUT)
            if response is not None and response.status_code != 503:
                self._write("let-go", queue_id, time.monotonic(), response.status_code)
                return
            if response is not None:
                self._write("heard", queue_id, sent)
            time.sleep(0.1)

    def _ask(self, action: str, body: object, expected: tuple[int, ...], timeout: float = _TIMEOUT) -> Any:
        """Return the response, including `NOT_YET`; return None without a response or during an outage."""
        try:
            response = self._http.post(f"/queue/{action}", json=body, timeout=timeout)
        except httpx.HTTPError:
            self.counts["pull unanswered"] += 1
            return None
        if response.status_code in _RETRYABLE:
            is_unknown = response.json()["title"] == NOT_YET
            self.counts["pull not known yet" if is_unknown else "pull refused"] += 1
            return response if is_unknown else None
        if response.status_code not in expected:
            self.violations.append(f"/queue/{action} was answered {response.status_code}: {response.text:.300}")
        return response

    def _write(self, *fields: object) -> None:
        append(self._arena.journal.commit_log, *fields)
