"""Connections that are cut, held up, and late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from random import Random

from tests.chaos.real.arena import Arena
from tests.chaos.real.faults.kinds import a_scheduler, fault
from tests.chaos.real.proxy import Proxy


@fault
def cut_worker(arena: Arena, pick: Random) -> Iterator[str]:
    """A worker's connections are reset, and new ones refused."""
    worker = pick.choice(arena.workers)
    with arena.journal.unheard(worker.pid):
        yield from _disturbed([worker.redis], Proxy.cut, f"{worker} cut off from Redis")


@fault
def cut_redis(arena: Arena, pick: Random) -> Iterator[str]:
    """Nobody reaches Redis, or only the schedulers do not."""
    who = pick.choice(("everybody", "schedulers"))
    yield from _disturbed(_wires_to_redis(arena, who), Proxy.cut, f"{who} cut off from Redis")


@fault
def cut_leader(arena: Arena, pick: Random) -> Iterator[str]:
    """Redis, or Postgres, refuses one scheduler, mostly the one that leads; the others could do its work."""
    scheduler = a_scheduler(arena, pick)
    wires = [scheduler.redis] if scheduler.postgres is None or pick.random() < 0.7 else [scheduler.postgres]
    server = "Redis" if wires == [scheduler.redis] else "Postgres"
    yield from _disturbed(wires, Proxy.cut, f"{scheduler} alone cut off from {server}")


@fault
def stall_leader(arena: Arena, pick: Random) -> Iterator[str]:
    """Packets between one scheduler, mostly the one that leads, and Redis go nowhere."""
    scheduler = a_scheduler(arena, pick)
    yield from _disturbed([scheduler.redis], Proxy.stall, f"connections of {scheduler} alone to Redis stalled")


@fault
def cut_postgres(arena: Arena, pick: Random) -> Iterator[str]:
    who, wires = _wires_to_postgres(arena, pick)
    yield from _disturbed(wires, Proxy.cut, f"{who} cut off from Postgres")


@fault
def stall_worker(arena: Arena, pick: Random) -> Iterator[str]:
    """A worker's packets go nowhere, and nobody is told."""
    worker = pick.choice(arena.workers)
    with arena.journal.unheard(worker.pid):
        yield from _disturbed([worker.redis], Proxy.stall, f"connections of {worker} to Redis stalled")


@fault
def stall_redis(arena: Arena, pick: Random) -> Iterator[str]:
    who = pick.choice(("everybody", "schedulers"))
    yield from _disturbed(_wires_to_redis(arena, who), Proxy.stall, f"connections of {who} to Redis stalled")


@fault
def stall_postgres(arena: Arena, pick: Random) -> Iterator[str]:
    who, wires = _wires_to_postgres(arena, pick)
    yield from _disturbed(wires, Proxy.stall, f"connections of {who} to Postgres stalled")


@fault
def delay_wires(arena: Arena, pick: Random) -> Iterator[str]:
    """Every packet of one process, or of all, is late by a good part of a heartbeat."""
    seconds = pick.choice((0.02, 0.1, 0.3))
    members = pick.choice([[member] for member in arena.members] + [arena.members])
    wires = [wire for member in members for wire in (member.redis, member.postgres) if wire is not None]
    who = members[0].name if len(members) == 1 else "everybody"
    yield from _disturbed(wires, lambda wire: wire.delay(seconds), f"packets of {who} delayed by {seconds:g} s")


@fault
def partition(arena: Arena, pick: Random) -> Iterator[str]:
    """The cable of a worker's or a scheduler's host is pulled: nothing passes, and nobody is told."""
    member = pick.choice([member for member in arena.members if member.host is not None])
    assert member.host is not None
    with arena.journal.unheard(member.pid, settling=4.0):  # TCP tries again at growing intervals
        member.host.pull_cable()
        try:
            yield f"the host of {member} partitioned"
        finally:
            member.host.plug_in()


def _wires_to_redis(arena: Arena, who: str) -> list[Proxy]:
    if who == "schedulers":
        return [member.redis for member in arena.schedulers]
    return [*(member.redis for member in arena.members), arena.client_wires[0]]


def _wires_to_postgres(arena: Arena, pick: Random) -> tuple[str, list[Proxy]]:
    scheduler = a_scheduler(arena, pick)
    of_schedulers = [member.postgres for member in arena.schedulers if member.postgres is not None]
    of_one = [scheduler.postgres] if scheduler.postgres is not None else []
    client = arena.client_wires[1]
    choices = [(scheduler.name, of_one), ("everybody", [*of_schedulers, client]), ("the client", [client])]
    return pick.choice(choices)


def _disturbed(wires: list[Proxy], disturb: Callable[[Proxy], None], what: str) -> Iterator[str]:
    with ExitStack() as stack:
        for wire in wires:
            stack.callback(wire.heal)
            disturb(wire)
        yield what
