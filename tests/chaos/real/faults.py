"""What can go wrong, one context manager each: entering it strikes, leaving it heals.

Each yields what it did, for the record. A fault that could leave a worker unheard writes that down, because only then
may its tasks run elsewhere at the same time; all the others, an outage of Redis for everybody among them, excuse
nothing.

`pick` chooses the victim and the variant; the same number means the same choice in every run of a plan.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from random import Random

from redis.exceptions import OutOfMemoryError, RedisError

from tests.chaos.real.arena import Arena
from tests.chaos.real.members import Member
from tests.chaos.real.proxy import Proxy

Fault = Callable[[Arena, Random], AbstractContextManager[str]]
FAULTS: dict[str, Fault] = {}
"""Every kind of fault by its name; the part before the hyphen names its group."""
NEEDS_HOSTS = frozenset({"partition"})

_FILLER = "chaos:filler"
_ROOM = 1 << 20


def fault(function: Callable[[Arena, Random], Iterator[str]]) -> Fault:
    """Make a kind of fault of a generator that strikes, yields, and heals."""
    made = contextmanager(function)
    FAULTS[function.__name__.replace("_", "-")] = made
    return made


# -- signals


@fault
def kill_worker(arena: Arena, pick: Random) -> Iterator[str]:
    """A machine dies: the worker's parent and all its processes, at once and without a word."""
    worker = pick.choice(arena.workers)
    with worker.held_down():
        _kill_group(arena, worker)
        yield f"kill -9 of {worker} and all its processes"


@fault
def kill_parent(arena: Arena, pick: Random) -> Iterator[str]:
    """Only the parent dies; its processes must not outlive it."""
    worker = pick.choice(arena.workers)
    with worker.held_down():
        arena.journal.note_deaths([worker.pid])
        worker.signal(signal.SIGKILL)
        yield f"kill -9 of {worker}'s parent process"


@fault
def kill_child(arena: Arena, pick: Random) -> Iterator[str]:
    """One worker process dies, or a child in which it runs a task alone; its parent lives."""
    yield _to_child(arena, pick, signal.SIGKILL)


@fault
def kill_scheduler(arena: Arena, pick: Random) -> Iterator[str]:
    scheduler = _scheduler(arena, pick)
    with scheduler.held_down():
        _kill_group(arena, scheduler)
        yield f"kill -9 of {scheduler}"


@fault
def stop_worker(arena: Arena, pick: Random) -> Iterator[str]:
    """A machine stands still: a virtual machine that is moved, or memory that swaps."""
    worker = pick.choice(arena.workers)
    with arena.journal.unheard(worker.pid), _stopped(worker):
        yield f"SIGSTOP of {worker} and all its processes"


@fault
def stop_parent(arena: Arena, pick: Random) -> Iterator[str]:
    """Nobody beats for the worker's processes, which go on."""
    worker = pick.choice(arena.workers)
    pid = worker.pid
    with arena.journal.unheard(pid):
        worker.signal(signal.SIGSTOP)
        try:
            yield f"SIGSTOP of {worker}'s parent process"
        finally:
            _send(pid, signal.SIGCONT)


@fault
def stop_child(arena: Arena, pick: Random) -> Iterator[str]:
    """One worker process stands still while its parent beats: it is heard, and its tasks are its own."""
    worker = pick.choice(arena.workers)
    children = worker.descendants()
    pid = pick.choice(children).pid if children else None
    if pid is None:
        yield f"nothing: {worker} has no processes now"
        return
    _send(pid, signal.SIGSTOP)
    try:
        yield f"SIGSTOP of process {pid} of {worker}"
    finally:
        _send(pid, signal.SIGCONT)


@fault
def stop_scheduler(arena: Arena, pick: Random) -> Iterator[str]:
    scheduler = _scheduler(arena, pick)
    with _stopped(scheduler):
        yield f"SIGSTOP of {scheduler}"


@fault
def term_worker(arena: Arena, pick: Random) -> Iterator[str]:
    """A rolling deploy: drain, end, and start again; now and then by someone in a hurry, who asks twice."""
    worker = pick.choice(arena.workers)
    twice = pick.random() < 0.3
    with worker.held_down():
        worker.signal(signal.SIGTERM)
        yield f"SIGTERM of {worker}" + (", twice" if twice else "")
        if twice:
            worker.signal(signal.SIGTERM)


@fault
def term_child(arena: Arena, pick: Random) -> Iterator[str]:
    yield _to_child(arena, pick, signal.SIGTERM)


@fault
def term_scheduler(arena: Arena, pick: Random) -> Iterator[str]:
    scheduler = _scheduler(arena, pick)
    with scheduler.held_down():
        scheduler.signal(signal.SIGTERM)
        yield f"SIGTERM of {scheduler}"


# -- servers


@fault
def postgres_restart(arena: Arena, pick: Random) -> Iterator[str]:
    """Postgres crashes and recovers from its log."""
    arena.services.postgres.stop("immediate")
    try:
        yield "Postgres stopped in immediate mode"
    finally:
        arena.services.postgres.start()


@fault
def redis_restart(arena: Arena, pick: Random) -> Iterator[str]:
    """Redis crashes and comes back with what its log had: everything, or what it had before its last life."""
    yield from _redis_restarts(arena, persistence=True)


@fault
def redis_empty(arena: Arena, pick: Random) -> Iterator[str]:
    """Redis crashes and comes back with nothing, and keeps nothing in this life."""
    yield from _redis_restarts(arena, persistence=False)


@fault
def redis_flush(arena: Arena, pick: Random) -> Iterator[str]:
    with arena.redis() as redis:
        redis.flushall()
    yield "FLUSHALL"


@fault
def redis_full(arena: Arena, pick: Random) -> Iterator[str]:
    """Redis has no memory left and, as it must, refuses writes rather than to forget something."""
    with arena.redis() as redis:
        redis.config_set("maxmemory", redis.info("memory")["used_memory"] + _ROOM)
        try:
            with suppress(OutOfMemoryError):
                while True:
                    redis.append(_FILLER, b"\0" * (_ROOM // 8))
            yield "Redis filled to its maxmemory"
        finally:
            with suppress(RedisError):  # it restarted meanwhile, and has no limit any more
                redis.config_set("maxmemory", 0)
                redis.delete(_FILLER)


# -- wires


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


# -- how


def _scheduler(arena: Arena, pick: Random) -> Member:
    """Return a scheduler: mostly the one that leads."""
    leads = pick.random() < 0.75
    return (arena.leader() if leads else None) or pick.choice(arena.schedulers)


def _kill_group(arena: Arena, member: Member) -> None:
    arena.journal.note_deaths([member.pid])
    member.signal_group(signal.SIGKILL)


def _to_child(arena: Arena, pick: Random, number: signal.Signals) -> str:
    worker = pick.choice(arena.workers)
    children = worker.descendants()
    if not children:
        return f"nothing: {worker} has no processes now"
    child = pick.choice(children)
    if number is signal.SIGKILL:
        arena.journal.note_deaths([child.pid, *(below.pid for below in child.children(recursive=True))])
    _send(child.pid, number)
    return f"{number.name} of process {child.pid} of {worker}"


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@contextmanager
def _stopped(member: Member) -> Iterator[None]:
    group = member.pid
    member.signal_group(signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGCONT)


def _redis_restarts(arena: Arena, persistence: bool) -> Iterator[str]:
    arena.services.redis.kill()
    try:
        yield f"Redis killed; it comes back {'with its log' if persistence else 'empty'}"
    finally:
        arena.services.redis.start(persistence)


def _wires_to_redis(arena: Arena, who: str) -> list[Proxy]:
    if who == "schedulers":
        return [member.redis for member in arena.schedulers]
    return [*(member.redis for member in arena.members), arena.client_wires[0]]


def _wires_to_postgres(arena: Arena, pick: Random) -> tuple[str, list[Proxy]]:
    scheduler = _scheduler(arena, pick)
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
