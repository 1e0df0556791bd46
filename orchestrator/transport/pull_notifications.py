"""Receives notifications of offered or completed pull work, in one thread for all waits of a process.

Notifications only make waits faster: a wait checks again every few seconds, and whenever the connection was lost.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from redis import Redis

from orchestrator.transport.connection import UNAVAILABLE

_MAX_PAUSE = 2.0

Wake = Callable[[], None]


class PullNotifications:
    """Listens to one channel whose messages are names."""

    def __init__(self, redis: Redis, channel: str, *, one_by_one: bool) -> None:
        """With `one_by_one`, a message wakes the oldest waiter for its name; otherwise all of them."""
        self._redis = redis
        self._channel = channel
        self._one_by_one = one_by_one
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[Wake, None]] = {}
        self._thread: threading.Thread | None = None
        self._subscribed = threading.Event()
        """Set once the subscription is confirmed."""
        self._closed = threading.Event()

    @contextmanager
    def listening(self, names: Iterable[str], wake: Wake) -> Iterator[None]:
        """Call `wake` when a message with one of these names arrives."""
        names = tuple(names)
        with self._lock:
            for name in names:
                self._waiting.setdefault(name, {})[wake] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="orchestrator-pull", daemon=True)
                self._thread.start()
        self._subscribed.wait(1.0)
        try:
            yield
        finally:
            with self._lock:
                for name in names:
                    waiting = self._waiting.get(name, {})
                    waiting.pop(wake, None)
                    if not waiting:
                        self._waiting.pop(name, None)

    def close(self) -> None:
        """Stop the thread, waiting for it only briefly. Its connection may then be closed."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(2.0)

    def _run(self) -> None:
        try:
            self._listen()
        except Exception:
            if not self._closed.is_set():  # else it was closed during a read, which the driver does not expect
                raise

    def _listen(self) -> None:
        pause = 0.05
        while not self._closed.is_set():
            pubsub = self._redis.pubsub(ignore_subscribe_messages=False)  # type: ignore[no-untyped-call]
            with contextlib.suppress(*UNAVAILABLE), contextlib.closing(pubsub):
                pubsub.subscribe(self._channel)
                while not self._closed.is_set():
                    message = pubsub.get_message(timeout=0.5)
                    if message is None:
                        continue
                    if message["type"] == "subscribe":
                        self._subscribed.set()
                        self._wake(None)  # earlier messages were missed
                    elif message["type"] == "message":
                        self._wake(message["data"].decode("utf-8", "replace"))
                    pause = 0.05
            self._closed.wait(pause)
            pause = min(pause * 2, _MAX_PAUSE)

    def _wake(self, name: str | None) -> None:
        with self._lock:
            if name is None:
                woken = list({wake: None for waiting in self._waiting.values() for wake in waiting})
            else:
                woken = list(self._waiting.get(name, {}))[: 1 if self._one_by_one else None]
            if name is not None and self._one_by_one and woken:
                waiting = self._waiting[name]
                waiting[woken[0]] = waiting.pop(woken[0])  # the next message wakes the next waiter
        for wake in woken:
            wake()
