"""Somebody who has only the HTTP API, and who asks again until a task is acknowledged: with the same key each time.

An acknowledged task is there and comes to an end, and however often one asked, there is one: the task's argument says
which key it was for.
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

_EVERY = 0.05
_TIMEOUT = 3.0
_LAST_ANSWER = 30.0
_AGAIN = {429, 503}
"""What the API may answer while something is away; anything else but an id is a defect."""


class Visitor:
    """Enqueues over HTTP, in a thread."""

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
        """Ask for nothing new, and go on asking for what was not acknowledged."""
        self._stopping.set()

    def close(self) -> None:
        """End, when everything is healed: by now the last one must have been acknowledged."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(_LAST_ANSWER)
            if self._thread.is_alive():
                self.violations.append("somebody who enqueued over HTTP was never answered")

    def _run(self) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{self._arena.api_port}", timeout=_TIMEOUT) as client:
            while not self._stopping.wait(_EVERY):
                self._enqueue(client, f"key-{next(self._keys)}")

    def _enqueue(self, client: httpx.Client, key: str) -> None:
        call = {"name": work_for.name, "args": [key, self._random.choice((0.0, 0.0, 0.05))]}
        pause = threading.Event()
        while True:
            try:
                answer = client.post("/api/v1/tasks", json=call, headers={"Idempotency-Key": key})
            except httpx.HTTPError:
                self.counts["over_http unanswered"] += 1
            else:
                if answer.status_code == 201:
                    append(self._arena.journal.commit_log, "task", answer.json()["id"])
                    self.counts["over_http"] += 1
                    if self._random.random() < 0.1:
                        self._ask_again(client, key, call, answer.json()["id"])
                    return
                if answer.status_code not in _AGAIN:
                    self.violations.append(
                        f"who enqueued over HTTP was answered {answer.status_code}: {answer.text:.300}"
                    )
                    return
                self.counts["over_http refused"] += 1
            pause.wait(0.1)

    def _ask_again(self, client: httpx.Client, key: str, call: Mapping[str, object], task: str) -> None:
        """Ask once more for what was acknowledged: it is the same task."""
        try:
            answer = client.post("/api/v1/tasks", json=call, headers={"Idempotency-Key": key})
        except httpx.HTTPError:
            return
        if answer.status_code == 201 and answer.json()["id"] != task:
            self.violations.append(f"key {key} was task {task}, and is now {answer.json()['id']}")
