"""A waiter does not query a task that was enqueued just now: the end of the task is announced soon."""

from __future__ import annotations

import time

import pytest

from orchestrator.domain.ids import time_ordered_id
from orchestrator.sdk.backend.waiting import EndWaiters
from orchestrator.settings import Settings
from orchestrator.time_limits import TimeLimit
from orchestrator.transport.codec import Ended


class _NoAnnouncements:
    """Announcements that never arrive."""

    def listen(self, *_: object) -> None: ...

    def forget(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("age", "timeout", "looks"), [(0.0, None, False), (10.0, None, True), (-10.0, None, True), (0.0, 0.0, True)]
)
def test_a_waiter_queries_at_once_unless_the_task_is_new(
    age: float, timeout: float | None, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    looked: list[float] = []
    ended: list[Ended | None] = [None]

    def find_end() -> Ended | None:
        looked.append(time.monotonic())
        return ended[0]

    waiters = EndWaiters(Settings(redis_url="redis://localhost:1"), lambda _: [])
    waiters._announcements = _NoAnnouncements  # type: ignore[assignment]
    task = time_ordered_id(now // 1_000_000 - int(age * 1000), bytes(10))
    steps = waiters.wait(task, find_end, TimeLimit(timeout))
    pause = next(steps, None)
    assert bool(looked) is looks
    if timeout is None:
        assert pause is not None
        assert pause.seconds == (5.0 if looks else 0.025)
        ended[0] = Ended(task, "success", b"\x01")
        with pytest.raises(StopIteration) as caught:
            next(steps)
        assert caught.value.value is ended[0], "the next look finds it"
