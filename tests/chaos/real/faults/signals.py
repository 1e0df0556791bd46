"""Processes that are killed, stopped, and terminated."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from random import Random

from tests.chaos.breaking import send, stopped
from tests.chaos.real.arena import Arena
from tests.chaos.real.faults.kinds import a_scheduler, fault
from tests.chaos.real.members import Member


@fault
def kill_worker(arena: Arena, pick: Random) -> Iterator[str]:
    """Kill a worker's parent and all its processes, like the crash of a machine."""
    worker = pick.choice(arena.workers)
    with worker.held_down():
        _kill_group(arena, worker)
        yield f"kill -9 of {worker} and all its processes"


@fault
def kill_parent(arena: Arena, pick: Random) -> Iterator[str]:
    """Kill only a worker's parent; its processes must end too."""
    worker = pick.choice(arena.workers)
    with worker.held_down():
        _note_death(arena, worker)
        worker.signal(signal.SIGKILL)
        yield f"kill -9 of {worker}'s parent process"


@fault
def kill_child(arena: Arena, pick: Random) -> Iterator[str]:
    """Kill one worker process, or the child in which it runs a task alone; the parent survives."""
    yield _to_child(arena, pick, signal.SIGKILL)


@fault
def kill_scheduler(arena: Arena, pick: Random) -> Iterator[str]:
    scheduler = a_scheduler(arena, pick)
    with scheduler.held_down():
        _kill_group(arena, scheduler)
        yield f"kill -9 of {scheduler}"


@fault
def kill_api(arena: Arena, pick: Random) -> Iterator[str]:
    """Kill the HTTP API, possibly between the commit of a task and the response."""
    api = pick.choice(arena.apis)
    with api.held_down():
        _kill_group(arena, api)
        yield f"kill -9 of {api}"


@fault
def stop_api(arena: Arena, pick: Random) -> Iterator[str]:
    api = pick.choice(arena.apis)
    with stopped(api.pid):
        yield f"SIGSTOP of {api}"


@fault
def term_api(arena: Arena, pick: Random) -> Iterator[str]:
    api = pick.choice(arena.apis)
    with api.held_down():
        api.signal(signal.SIGTERM)
        yield f"SIGTERM of {api}"


@fault
def stop_worker(arena: Arena, pick: Random) -> Iterator[str]:
    """Stop a worker with all its processes, like a migrated virtual machine or a swapping host."""
    worker = pick.choice(arena.workers)
    with arena.journal.unheard(worker.pid), stopped(worker.pid):
        yield f"SIGSTOP of {worker} and all its processes"


@fault
def stop_parent(arena: Arena, pick: Random) -> Iterator[str]:
    """Stop a worker's parent, which sends the heartbeats; its processes continue."""
    worker = pick.choice(arena.workers)
    pid = worker.pid
    with arena.journal.unheard(pid):
        worker.signal(signal.SIGSTOP)
        try:
            yield f"SIGSTOP of {worker}'s parent process"
        finally:
            send(pid, signal.SIGCONT)


@fault
def stop_child(arena: Arena, pick: Random) -> Iterator[str]:
    """Stop one worker process while its parent sends heartbeats: the worker is heard, and keeps its tasks."""
    worker = pick.choice(arena.workers)
    children = worker.descendants()
    pid = pick.choice(children).pid if children else None
    if pid is None:
        yield f"nothing: {worker} has no processes now"
        return
    send(pid, signal.SIGSTOP)
    try:
        yield f"SIGSTOP of process {pid} of {worker}"
    finally:
        send(pid, signal.SIGCONT)


@fault
def stop_scheduler(arena: Arena, pick: Random) -> Iterator[str]:
    scheduler = a_scheduler(arena, pick)
    with stopped(scheduler.pid):
        yield f"SIGSTOP of {scheduler}"


@fault
def term_worker(arena: Arena, pick: Random) -> Iterator[str]:
    """Terminate a worker as in a rolling deploy, sometimes with a second SIGTERM."""
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
    scheduler = a_scheduler(arena, pick)
    with scheduler.held_down():
        scheduler.signal(signal.SIGTERM)
        yield f"SIGTERM of {scheduler}"


def _kill_group(arena: Arena, member: Member) -> None:
    _note_death(arena, member)
    member.signal_group(signal.SIGKILL)


def _note_death(arena: Arena, member: Member) -> None:
    """Record that a process and its descendants die now.

    A process that has ended earlier, by another fault or on request, has an unknown time of death.
    """
    if member.is_running():
        arena.journal.note_deaths([member.pid, *(descendant.pid for descendant in member.descendants())])


def _to_child(arena: Arena, pick: Random, number: signal.Signals) -> str:
    worker = pick.choice(arena.workers)
    children = worker.descendants()
    if not children:
        return f"nothing: {worker} has no processes now"
    child = pick.choice(children)
    if number is signal.SIGKILL:
        arena.journal.note_deaths([child.pid, *(descendant.pid for descendant in child.children(recursive=True))])
    send(child.pid, number)
    return f"{number.name} of process {child.pid} of {worker}"
