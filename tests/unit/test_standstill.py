"""Tasks that wait for a blocked event loop."""

from __future__ import annotations

from typing import Any

from orchestrator.workers.parent.held import HeldAttempts
from orchestrator.workers.running.standstill import Standstill


class Loop:
    """An event loop that has been blocked for a number of seconds."""

    def __init__(self) -> None:
        self.standing = 0.0

    def measure_stall(self, _: float) -> float:
        return self.standing

    def describe_block(self) -> str:
        return "a task keeps it"


def new_standstill(loop: Loop, given_up: list[str] | None = None) -> Standstill:
    watched: Any = loop
    standstill = Standstill(watched, HeldAttempts(1), print if given_up is None else given_up.append, 5.0)
    standstill.check(0.0)
    return standstill


def test_a_returned_task_stays_away_longer_each_time() -> None:
    loop = Loop()
    standstill = new_standstill(loop)
    assert standstill.delay(b"a", 1.0) == 0.0
    standstill.check(1.0)  # the loop has turned
    loop.standing = 0.3
    standstill.check(1.0)
    assert not standstill.hands_back
    assert [standstill.delay(task, 1.0) for task in (b"a", b"b")] == [0.0, 0.0], "others may have them at once"
    assert standstill.hands_back
    assert [standstill.delay(task, 1.1) for task in (b"c", b"a", b"b", b"d")] == [0.0, 0.2, 0.2, 0.2]
    assert standstill.delay(b"c", 1.2) == 0.2, "it was not away for so long"
    stays = [standstill.may_stay(task, waited) for task, waited in ((b"a", 0.9), (b"a", 1.1), (b"new", 0.9))]
    assert stays == [True, False, False], "what nobody else takes may wait here for a while"
    told = [standstill.delay(b"a", now) for now in (1.4, 2.0, 3.0, 4.1, 5.2)]
    assert told == [0.4, 0.8, 1.0, 1.0, 1.0]
    loop.standing = 0.0
    standstill.check(6.0)
    assert not standstill.hands_back
    loop.standing = 0.3
    standstill.check(7.0)
    assert standstill.delay(b"a", 7.0) == 0.0, "this is another time"


def test_a_standstill_lasts_until_the_loop_turns_or_is_idle() -> None:
    loop = Loop()
    standstill = new_standstill(loop)
    for standing, lasts in ((0.1, False), (0.2, True), (4.0, True), (0.0, False), (0.3, True)):
        loop.standing = standing
        standstill.check(1.0)
        assert standstill.is_stalled is lasts
    assert standstill.delay(b"a", 1.0) == 0.0
    standstill.reset()
    assert not standstill.is_stalled
    assert not standstill.hands_back


def test_a_blocked_loop_is_given_up_once() -> None:
    loop, given_up = Loop(), list[str]()
    standstill = new_standstill(loop, given_up)
    for standing in (1.5, 5.0, 5.1, 6.0):
        loop.standing = standing
        standstill.check(1.0)
    assert given_up == ["a task keeps it"]
