"""A client of server-sent events that reconnects, as a browser does, with the id of the last event."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from tests.waiting import eventually


class Event(NamedTuple):
    kind: str
    data: Any
    id: str


class Listener:
    """Listens in a thread until `stop` is called or the stream ends."""

    def __init__(self, url: str, *, key: str | None = None, last: str = "") -> None:
        self.url = url
        self.events: list[Event] = []
        self.last = last
        self.connections = 0
        self.statuses: list[int] = []
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def of(self, kind: str) -> list[Any]:
        return [event.data for event in self.events if event.kind == kind]

    def wait_for(self, condition: Callable[[], Any], description: str) -> Any:
        return eventually(condition, f"{description}; heard {[event.kind for event in self.events][-20:]}")

    def begun(self) -> Listener:
        """Wait for the first snapshot; return the listener."""
        self.wait_for(lambda: self.of("snapshot"), "a snapshot")
        return self

    def stop(self) -> None:
        self._stop.set()

    def join(self) -> list[Event]:
        self.wait_for(lambda: not self._thread.is_alive(), "the end of the stream")
        return self.events

    def _run(self) -> None:
        while not self._stop.is_set():
            headers = self._headers | ({"Last-Event-ID": self.last} if self.last else {})
            try:
                with httpx.stream("GET", self.url, headers=headers, timeout=10) as answer:
                    self.statuses.append(answer.status_code)
                    if answer.status_code != 200:
                        return
                    self.connections += 1
                    for event in parse(answer.iter_lines()):
                        if self._stop.is_set():
                            return
                        self.last = event.id or self.last
                        self.events.append(event)
                        if event.kind == "end":
                            return
            except httpx.HTTPError:
                self._stop.wait(0.05)


def parse(lines: Iterator[str]) -> Iterator[Event]:
    """Parse the events of a stream."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
        elif "data" in fields:
            yield Event(fields.get("event", "message"), json.loads(fields["data"]), fields.get("id", ""))
            fields = {}
        else:
            fields = {}


@contextmanager
def listening(url: str, **options: Any) -> Iterator[Listener]:
    listener = Listener(url, **options)
    try:
        yield listener
    finally:
        listener.stop()


def enqueue(api: str, name: str, *args: object, **options: object) -> str:
    """Enqueue a task over HTTP; return its id."""
    answer = httpx.post(f"{api}/tasks", json={"name": f"project.{name}", "args": list(args), **options})
    return str(answer.raise_for_status().json()["id"])


def ended(listener: Listener) -> list[str]:
    """Return the ids of successful tasks among the events received."""
    changes = (change for event in listener.of("tasks") for change in event["tasks"])
    return [change["id"] for change in changes if change["status"] == "success"]
