"""How a kind of fault is made, and all of them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from random import Random

from tests.chaos.real import clocks, hosts
from tests.chaos.real.arena import Arena
from tests.chaos.real.members import Member

Fault = Callable[[Arena, Random], AbstractContextManager[str]]
FAULTS: dict[str, Fault] = {}
"""Every kind of fault by its name; the part before the hyphen names its group."""
_NEEDS_HOSTS = ("partition",)
_NEEDS_CLOCKS = ("clock-member", "clock-redis")


def fault(function: Callable[[Arena, Random], Iterator[str]]) -> Fault:
    """Make a kind of fault of a generator that strikes, yields, and heals."""
    made = contextmanager(function)
    FAULTS[function.__name__.replace("_", "-")] = made
    return made


def a_scheduler(arena: Arena, pick: Random) -> Member:
    """Return a scheduler: mostly the one that leads."""
    leads = pick.random() < 0.75
    return (arena.leader() if leads else None) or pick.choice(arena.schedulers)


def left_out() -> dict[str, str]:
    """Return the kinds of faults that are not possible on this system, and why."""
    without: dict[str, str] = {}
    if not hosts.are_permitted():
        without |= dict.fromkeys(_NEEDS_HOSTS, "This system does not let us make network namespaces (try as root).")
    if not clocks.are_possible():
        without |= dict.fromkeys(_NEEDS_CLOCKS, "There is no C compiler (cc) to make clocks with.")
    return without
