"""What a client process does with any of the queues. Only the standard library: every contestant imports it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Protocol


class Queue(Protocol):
    """One contestant, as its client uses it. The task does nothing and returns 1."""

    packages: tuple[str, ...]
    """Whose versions belong into the report."""

    def prepare(self) -> None:
        """Create the schema, open the connections."""

    def ready(self) -> bool:
        """Tell whether everything but the workers is up."""

    def enqueue_bulk(self, count: int) -> None:
        """Enqueue many tasks by the fastest way that its API offers."""

    def enqueue_singly(self, count: int) -> None:
        """Enqueue one task after the other, each one safe before the next."""

    def wait_for_last(self) -> None:
        """Wait, without polling if it can, for the last task that `enqueue_bulk` enqueued."""

    def ended(self) -> int:
        """Return how many tasks have a recorded success."""

    def check(self, total: int) -> None:
        """Raise unless exactly `total` tasks were enqueued, each ended once with success, and none is left."""

    def round_trip(self) -> None:
        """Enqueue one task and wait for its result."""


class Composer(Protocol):
    """A queue that has compositions; each of these returns when the result is there, and checks it."""

    def run_chain(self, count: int) -> None:
        """Run tasks one after another."""

    def run_group(self, count: int) -> None:
        """Run tasks at the same time, and fetch what they return."""

    def run_chord(self, count: int) -> None:
        """Run tasks at the same time, and then one more."""


class Sender(Protocol):
    """A queue whose results can be waited for by many threads at once."""

    def send(self) -> Waiter:
        """Enqueue one task."""


class Waiter(Protocol):
    """A handle."""

    def result(self, timeout: float) -> object:
        """Wait for the result."""


def redis_url(database: int) -> str:
    """Return the URL of one of Redis's numbered databases."""
    url = os.environ["BENCH_REDIS_URL"]
    if url.startswith("unix:"):
        return f"{url}?db={database}"
    return f"{url.rpartition('/')[0]}/{database}"


def expect(what: str, found: object, expected: object) -> None:
    """Raise unless they are equal."""
    if found != expected:
        raise AssertionError(f"{what}: expected {expected}, found {found}")


def settle(what: str, ask: Callable[[], object], expected: object, timeout: float = 5.0) -> None:
    """Raise unless they become equal soon: some acknowledge a task a moment after its result can be seen."""
    deadline = time.monotonic() + timeout
    while ask() != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    expect(what, ask(), expected)
