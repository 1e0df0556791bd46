"""A thread that listens to Redis ends silently if its connection is closed.

The closer waits for the thread, but not for long: a machine may freeze for longer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from redis import Redis

from orchestrator.transport.client import Announcements
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys
from orchestrator.transport.pull_notifications import PullNotifications
from tests.integration.stage import ID

KEYS = Keys()


def hearing_of_offers(redis: Redis) -> Callable[[], threading.Thread | None]:
    notifications = PullNotifications(redis, KEYS.pull_offers, one_by_one=True)
    with notifications.listening(["sum"], lambda: None):
        pass

    def close() -> threading.Thread | None:
        notifications._closed.set()
        redis.close()
        return notifications._thread

    return close


def hearing_of_ends(redis: Redis) -> Callable[[], threading.Thread | None]:
    announcements = Announcements(redis, KEYS)
    announcements.listen(ID, lambda _: None)

    def close() -> threading.Thread | None:
        announcements._closed.set()
        with suppress(AttributeError):  # the thread closes it as well, and may be quicker
            announcements._pubsub.close()
        redis.close()
        return announcements._thread

    return close


@pytest.mark.parametrize("hearing", [hearing_of_offers, hearing_of_ends])
def test_closing_the_connection_of_a_listening_thread_raises_nothing(
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    hearing: Callable[[Redis], Callable[[], threading.Thread | None]],
) -> None:
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    threads = [close() for close in [hearing(connect(redis_url)) for _ in range(10)]]
    for thread in threads:
        assert thread is not None
        thread.join(60)
        assert not thread.is_alive()
    assert raised == []
