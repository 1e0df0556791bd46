"""Exceptions that are pending for threads do not hold up threads whose calls are watched."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator

import pytest

from orchestrator.errors import TaskTimeout
from orchestrator.workers.running.delivery import DELIVERY, Delivery
from tests.waiting import eventually

DEADLINE = 60.0
# The tests use the process's one Delivery: threads of a second one would stand still while the first one checks.


class Blocked:
    """A thread in a blocking call: no bytecode of it runs until `release`."""

    def __init__(self) -> None:
        self.caught: list[BaseException] = []
        self._first, self._enter = os.pipe()
        self._second, self._leave = os.pipe()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        os.write(self._enter, b"x")
        eventually(lambda: not select.select([self._first], [], [], 0)[0], "it is inside the call")

    @property
    def ident(self) -> int:
        assert self.thread.ident is not None
        return self.thread.ident

    def _run(self) -> None:
        try:
            deque(map(os.read, (self._first, self._second), (1, 1)))  # both reads are one call to the interpreter
            while True:
                pass
        except TaskTimeout as error:
            self.caught.append(error)

    def release(self) -> None:
        os.write(self._leave, b"x")

    def close(self) -> None:
        for end in (self._first, self._enter, self._second, self._leave):
            os.close(end)


@pytest.fixture
def blocked() -> Iterator[Blocked]:
    blocked = Blocked()
    yield blocked
    blocked.release()
    blocked.thread.join(DEADLINE)
    assert not blocked.thread.is_alive()
    blocked.close()


class Watched:
    """A thread whose calls are watched, until it is told to end."""

    def __init__(self, delivery: Delivery) -> None:
        self.calls = 0
        self.ends = False
        self._delivery = delivery
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with self._delivery.watched():
            sys.setprofile(lambda *_: None)
            while not self.ends:
                self._call()
            sys.setprofile(None)

    def _call(self) -> None:
        self.calls += 1
        time.sleep(0)

    def gets_on(self) -> None:
        calls = self.calls
        eventually(lambda: self.calls > calls + 10, "the watched thread gets on", DEADLINE)

    def end(self) -> None:
        self.ends = True
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive()


def test_a_newly_watched_thread_progresses_while_an_exception_is_pending(blocked: Blocked) -> None:
    delivery = DELIVERY
    delivery.send(blocked.ident, TaskTimeout)
    watched = Watched(delivery)
    watched.gets_on()
    watched.end()
    assert not blocked.caught
    blocked.release()
    eventually(lambda: blocked.caught, "it arrives when the call returns", DEADLINE)


def test_sending_an_exception_does_not_stop_a_watched_thread(blocked: Blocked) -> None:
    delivery = DELIVERY
    watched = Watched(delivery)
    watched.gets_on()
    delivery.send(blocked.ident, TaskTimeout)
    watched.gets_on()
    for _ in range(3):
        delivery.deliver_pending()  # as the clock calls it
        watched.gets_on()
    assert not blocked.caught
    watched.end()
    blocked.release()
    eventually(lambda: blocked.caught, "it arrives when the call returns", DEADLINE)
    delivery.deliver_pending()
    later = Watched(delivery)
    later.gets_on()
    later.end()


def test_an_exception_arrives_between_short_waits_despite_watched_threads() -> None:
    delivery = DELIVERY
    watched = Watched(delivery)
    caught: list[BaseException] = []

    def waits() -> None:
        try:
            while True:
                time.sleep(0.001)
        except TaskTimeout as error:
            caught.append(error)

    thread = threading.Thread(target=waits, daemon=True)
    thread.start()
    assert thread.ident is not None
    delivery.send(thread.ident, TaskTimeout)

    def look() -> bool:
        delivery.deliver_pending()
        return bool(caught)

    eventually(look, "it has arrived", DEADLINE)
    watched.end()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    assert isinstance(caught[0], TaskTimeout)
    kind = type(caught[0])
    assert (kind.__module__, kind.__qualname__) == (TaskTimeout.__module__, TaskTimeout.__qualname__)


def test_a_discarded_exception_does_not_arrive() -> None:
    delivery = DELIVERY
    ready, sent, ended = threading.Event(), threading.Event(), threading.Event()
    caught: list[BaseException] = []

    def ends() -> None:
        try:
            ready.set()
            sent.wait(DEADLINE)
        except TaskTimeout as error:
            caught.append(error)
        delivery.discard()
        for _ in range(1000):
            len("")
        ended.set()

    thread = threading.Thread(target=ends, daemon=True)
    thread.start()
    assert ready.wait(DEADLINE)
    assert thread.ident is not None
    delivery.send(thread.ident, TaskTimeout)
    sent.set()
    assert ended.wait(DEADLINE)
    delivery.deliver_pending()
    watched = Watched(delivery)
    watched.gets_on()
    watched.end()
