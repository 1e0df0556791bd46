"""Somebody who changes the number of shards while everything goes on, as docs/scaling.md says."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.chaos.simulator.world import World

_CLIENTS_LOOK = 2.5
"""Seconds after which every client has seen that a shard is closing."""
_ROLLS_OUT = 0.6
"""Seconds between a deploy of schedulers and workers and one of clients."""
_IS_OPEN = "SELECT coalesce(bool_or(is_open), false) AS is_open FROM orchestrator.shards WHERE shard >= %(number)s"


class Operator:
    """Does one step after the other, whenever the world lets it."""

    PAUSE = 0.25

    def __init__(self, world: World) -> None:
        self._world = world
        self._wanted: list[int] = []
        self._work: Generator[None] | None = None

    def ask(self, number: int) -> None:
        """Ask for so many shards; what was asked for before comes first."""
        self._wanted.append(number)

    @property
    def is_idle(self) -> bool:
        return not self._wanted and self._work is None

    def turn(self) -> None:
        """Do one step."""
        if self._work is None and self._wanted:
            number = self._wanted.pop(0)
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
        while world.is_anybody_paused:
            yield
        world.deploy(number)
        yield from self._pass(_ROLLS_OUT)
        world.clients.known_shards = number

    def _shrink(self, number: int) -> Generator[None]:
        world, before = self._world, len(self._world.redis_in_use)
        world.trace(f"operator: closes all but {number} shards: {world.database.reshard(number)}")
        while True:
            yield from self._pass(_CLIENTS_LOOK)
            while world.database.sql(_IS_OPEN, number=number)[0]["is_open"] or world.is_anybody_paused:
                yield
            world.deploy(number)
            said = world.database.reshard(number)
            world.trace(f"operator: gives up all but {number} shards: {said}")
            if not any("open work" in note for note in said):
                break
            world.deploy(before)
        for shard in range(number, before):
            world.give_up(shard)
        world.clients.known_shards = number

    def _pass(self, seconds: float) -> Generator[None]:
        until = self._world.now + seconds
        while self._world.now < until:
            yield
