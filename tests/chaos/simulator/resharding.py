"""An operator who changes the number of shards during operation, following docs/scaling.md."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.chaos.simulator.world import World

_CLIENT_REFRESH = 2.5
"""Seconds until every client has noticed that a shard is closing."""
_DEPLOY_GAP = 0.6
"""Seconds between the deploys of servers and of clients."""
_IS_OPEN = "SELECT coalesce(bool_or(is_open), false) AS is_open FROM orchestrator.shards WHERE shard >= %(number)s"


class Operator:
    """Performs one step of a resharding at each turn."""

    PAUSE = 0.25

    def __init__(self, world: World) -> None:
        self._world = world
        self._requested: list[int] = []
        self._work: Generator[None] | None = None

    def request(self, number: int) -> None:
        """Request a number of shards; requests are performed in order."""
        self._requested.append(number)

    @property
    def is_idle(self) -> bool:
        return not self._requested and self._work is None

    def turn(self) -> None:
        if self._work is None and self._requested:
            number = self._requested.pop(0)
            shards = len(self._world.redis_in_use)
            if number != shards:
                self._work = (self._grow if number > shards else self._shrink)(number)
        if self._work is not None:
            self._world.set_clocks()
            try:
                next(self._work)
            except StopIteration:
                self._work = None

    def _grow(self, number: int) -> Generator[None]:
        world = self._world
        world.trace(f"operator: makes {number} shards: {world.database.reshard(number)}")
        while world.is_any_scheduler_paused:
            yield
        world.deploy(number)
        yield from self._pass(_DEPLOY_GAP)
        world.clients.known_shards = number

    def _shrink(self, number: int) -> Generator[None]:
        world, before = self._world, len(self._world.redis_in_use)
        world.trace(f"operator: closes all but {number} shards: {world.database.reshard(number)}")
        while True:
            yield from self._pass(_CLIENT_REFRESH)
            while world.database.sql(_IS_OPEN, number=number)[0]["is_open"] or world.is_any_scheduler_paused:
                yield
            world.deploy(number)
            messages = world.database.reshard(number)
            world.trace(f"operator: gives up all but {number} shards: {messages}")
            if not any("open work" in message for message in messages):
                break
            world.deploy(before)
        for shard in range(number, before):
            world.give_up(shard)
        world.clients.known_shards = number

    def _pass(self, seconds: float) -> Generator[None]:
        until = self._world.now + seconds
        while self._world.now < until:
            yield
