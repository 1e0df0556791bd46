"""Connections that are cut, blocked, and delayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from random import Random

from tests.chaos.real.arena import Arena
from tests.chaos.real.faults.kinds import a_scheduler, fault
from tests.chaos.real.proxy import Proxy


@fault
def cut_worker(arena: Arena, pick: Random) -> Iterator[str]:
    """Reset a worker's connections, and refuse new ones."""
    worker = pick.choice(arena.workers)
    with arena.journal.unheard(worker.pid):
        yield from _disturb_all([worker.redis], Proxy.cut, f"{worker} cut off from Redis")


@fault
def cut_redis(arena: Arena, pick: Random) -> Iterator[str]:
    """Cut off all processes, or only the schedulers, from Redis."""
    affected = pick.choice(("everybody", "schedulers"))
    yield from _disturb_all(_wires_to_redis(arena, affected), Proxy.cut, f"{affected} cut off from Redis")


@fault
def cut_leader(arena: Arena, pick: Random) -> Iterator[str]:
    """Cut off one scheduler, usually the leader, from Redis or Postgres; a standby could lead."""
    scheduler = a_scheduler(arena, pick)
    wires = [scheduler.redis] if scheduler.postgres is None or pick.random() < 0.7 else [scheduler.postgres]
    server = "Redis" if wires == [scheduler.redis] else "Postgres"
    yield from _disturb_all(wires, Proxy.cut, f"{scheduler} alone cut off from {server}")


@fault
def stall_leader(arena: Arena, pick: Random) -> Iterator[str]:
    """Block the traffic between one scheduler, usually the leader, and Redis."""
    scheduler = a_scheduler(arena, pick)
    yield from _disturb_all([scheduler.redis], Proxy.stall, f"connections of {scheduler} alone to Redis stalled")


@fault
def cut_postgres(arena: Arena, pick: Random) -> Iterator[str]:
    affected, wires = _wires_to_postgres(arena, pick)
    yield from _disturb_all(wires, Proxy.cut, f"{affected} cut off from Postgres")


@fault
def stall_worker(arena: Arena, pick: Random) -> Iterator[str]:
    """Block a worker's traffic; its connections stay open."""
    worker = pick.choice(arena.workers)
    with arena.journal.unheard(worker.pid):
        yield from _disturb_all([worker.redis], Proxy.stall, f"connections of {worker} to Redis stalled")


@fault
def stall_redis(arena: Arena, pick: Random) -> Iterator[str]:
    affected = pick.choice(("everybody", "schedulers"))
    yield from _disturb_all(
        _wires_to_redis(arena, affected), Proxy.stall, f"connections of {affected} to Redis stalled"
    )


@fault
def stall_postgres(arena: Arena, pick: Random) -> Iterator[str]:
    affected, wires = _wires_to_postgres(arena, pick)
    yield from _disturb_all(wires, Proxy.stall, f"connections of {affected} to Postgres stalled")


@fault
def delay_wires(arena: Arena, pick: Random) -> Iterator[str]:
    """Delay every packet of one process, or of all, by up to 0.3 s."""
    seconds = pick.choice((0.02, 0.1, 0.3))
    members = pick.choice([[member] for member in arena.members] + [arena.members])
    wires = [wire for member in members for wire in (member.redis, member.postgres) if wire is not None]
    affected = members[0].name if len(members) == 1 else "everybody"
    yield from _disturb_all(wires, lambda wire: wire.delay(seconds), f"packets of {affected} delayed by {seconds:g} s")


@fault
def partition(arena: Arena, pick: Random) -> Iterator[str]:
    """Pull the network cable of a host: packets are lost in both directions, and connections stay open."""
    member = pick.choice([member for member in arena.members if member.host is not None])
    assert member.host is not None
    with arena.journal.unheard(member.pid, settling=4.0):  # TCP retries at growing intervals
        member.host.pull_cable()
        try:
            yield f"the host of {member} partitioned"
        finally:
            member.host.plug_in()


def _wires_to_redis(arena: Arena, affected: str) -> list[Proxy]:
    if affected == "schedulers":
        return [member.redis for member in arena.schedulers]
    return [*(member.redis for member in arena.members), arena.client_wires[0]]


def _wires_to_postgres(arena: Arena, pick: Random) -> tuple[str, list[Proxy]]:
    scheduler = a_scheduler(arena, pick)
    of_schedulers = [member.postgres for member in arena.schedulers if member.postgres is not None]
    own = [scheduler.postgres] if scheduler.postgres is not None else []
    client = arena.client_wires[1]
    choices = [(scheduler.name, own), ("everybody", [*of_schedulers, client]), ("the client", [client])]
    return pick.choice(choices)


def _disturb_all(wires: list[Proxy], disturb: Callable[[Proxy], None], description: str) -> Iterator[str]:
    with ExitStack() as stack:
        for wire in wires:
            stack.callback(wire.heal)
            disturb(wire)
        yield description
