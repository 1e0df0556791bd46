"""The registry of faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from random import Random

from tests.chaos.real import clocks, hosts
from tests.chaos.real.arena import Arena
from tests.chaos.real.members import Member

Fault = Callable[[Arena, Random], AbstractContextManager[str]]
FAULTS: dict[str, Fault] = {}
"""Every fault by its name; the part before the hyphen is its group."""
_NEEDS_HOSTS = ("partition",)
_NEEDS_CLOCKS = ("clock-member", "clock-redis")


def fault(function: Callable[[Arena, Random], Iterator[str]]) -> Fault:
    """Register a fault: a generator that injects the fault, yields a description, and heals it."""
    context_manager = contextmanager(function)
    FAULTS[function.__name__.replace("_", "-")] = context_manager
    return context_manager


def a_scheduler(arena: Arena, pick: Random) -> Member:
    """Return a scheduler, in three of four cases the leader."""
    leads = pick.random() < 0.75
    return (arena.leader() if leads else None) or pick.choice(arena.schedulers)


def left_out() -> dict[str, str]:
    """Return the faults that this system does not support, with the reasons."""
    without: dict[str, str] = {}
    if not hosts.are_permitted():
        without |= dict.fromkeys(_NEEDS_HOSTS, "This system does not let us make network namespaces (try as root).")
    if not clocks.are_possible():
        without |= dict.fromkeys(_NEEDS_CLOCKS, "There is no C compiler (cc) to make clocks with.")
    return without
