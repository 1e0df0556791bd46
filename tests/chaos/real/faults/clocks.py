"""Wall clocks that are set by an hour, and back.

The clock of Postgres is never set: it determines all due times.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tests.chaos.real.arena import Arena
from tests.chaos.real.clocks import Clock, RedisWithClock
from tests.chaos.real.faults.kinds import fault

_HOUR = 3600


@fault
def clock_member(arena: Arena, pick: Random) -> Iterator[str]:
    """Set the clock of a scheduler, worker or API process."""
    member = pick.choice(arena.members)
    assert member.clock is not None
    yield from _stepped(member.clock, pick, str(member))


@fault
def clock_redis(arena: Arena, pick: Random) -> Iterator[str]:
    """Set the clock of Redis, which determines the expiry of keys."""
    assert isinstance(arena.services.redis, RedisWithClock)
    yield from _stepped(arena.services.redis.clock, pick, "Redis")


def _stepped(clock: Clock, pick: Random, owner: str) -> Iterator[str]:
    ahead = pick.choice((_HOUR, -_HOUR))
    clock.step_to(ahead)
    try:
        yield f"the clock of {owner} set {'ahead' if ahead > 0 else 'back'} by an hour"
    finally:
        clock.step_to(0)
