"""Programs that have only the HTTP API: they pull work, hold it with heartbeats, and complete it.

Each start is written down, each heartbeat that the API took note of, and how it ended. Some die without a word.
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
"""Seconds that an answer may take; a completion may take as long as the API lets it wait."""
_COMPLETING = 25.0
_BEAT_EVERY = LEASE / 8
_DIE = 0.05
"""How likely it is that a holder dies."""
_AGAIN = {429, 503}
"""What the API may answer while something is away."""
NOT_YET = "It is not known yet"
"""The title of a refusal that says: go on."""


class Puller:
    """Polls in a few threads, and works in one for each task."""

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
        """End, when everything is at rest: by now all holders have been answered."""
        self._stopping.set()
        if not self._pollers[0].is_alive():
            return
        until = time.monotonic() + _COMPLETING
        for thread in (*self._pollers, *self._holders):
            thread.join(max(0.0, until - time.monotonic()))
        if any(holder.is_alive() for holder in self._holders):
            self.violations.append("somebody who completed pulled work was never answered")
        self._http.close()

    def _poll(self, number: int) -> None:
        asked = {"worker_id": f"puller-{number}", "services": [SERVICE], "wait": 1}
        while not self._stopping.is_set():
            answer = self._ask("poll", asked, (200, 204))
            if answer is None:
                self._stopping.wait(0.1)
            elif answer.status_code == 200:
                work = answer.json()
                dies = self._random.random() < _DIE
                holder = threading.Thread(target=self._hold, args=(work, dies), daemon=True)
                self._holders.append(holder)
                self._write("pulled", work["request_id"], work["task_id"], work["queue_id"], time.monotonic())
                self.counts["pulls"] += 1
                holder.start()

    def _hold(self, work: dict[str, Any], dies: bool) -> None:
        queue_id, seconds = work["queue_id"], work["input"]["seconds"]
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if dies and left < seconds / 2:
                self._write("let-go", queue_id, time.monotonic(), "died")
                return
            sent = time.monotonic()
            answer = self._ask("heartbeat", {"queue_id": queue_id}, (200, 409))
            if answer is not None and answer.status_code == 409:
                self._write("let-go", queue_id, time.monotonic(), "409")
                return
            if answer is not None:
                self._write("heard", queue_id, sent)
            time.sleep(min(_BEAT_EVERY, max(0.0, left)))
        while True:
            sent = time.monotonic()
            said = {"queue_id": queue_id, "result": queue_id}
            answer = self._ask("complete", said, (200, 409), _COMPLETING)
            if answer is not None and answer.status_code != 503:
                self._write("let-go", queue_id, time.monotonic(), answer.status_code)
                return
            if answer is not None:
                self._write("heard", queue_id, sent)
            time.sleep(0.1)

    def _ask(self, what: str, body: object, expected: tuple[int, ...], timeout: float = _TIMEOUT) -> Any:
        """Return the answer, also that it is not known yet; None where there was none, or something is away."""
        try:
            answer = self._http.post(f"/queue/{what}", json=body, timeout=timeout)
        except httpx.HTTPError:
            self.counts["pull unanswered"] += 1
            return None
        if answer.status_code in _AGAIN:
            is_unknown = answer.json()["title"] == NOT_YET
            self.counts["pull not known yet" if is_unknown else "pull refused"] += 1
            return answer if is_unknown else None
        if answer.status_code not in expected:
            self.violations.append(f"/queue/{what} was answered {answer.status_code}: {answer.text:.300}")
        return answer

    def _write(self, *words: object) -> None:
        append(self._arena.journal.commit_log, *words)
