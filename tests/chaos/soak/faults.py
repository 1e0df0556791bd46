"""Faults of a soak test: one after another, chosen from a seed, each healed before the next.

The same seed gives the same plan; the effects depend on timing and the machine.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.embedded import EmbeddedServices
from tests.chaos.breaking import flush_redis, postgres_down, redis_down, send, stopped
from tests.chaos.soak.machines import Machine, Machines


@dataclass(frozen=True)
class World:
    """The targets of faults."""

    services: EmbeddedServices
    machines: Machines


class Fault(NamedTuple):
    """A kind of fault."""

    name: str
    weight: int
    strike: Callable[[World, random.Random], str]
    """Injects and heals the fault; returns its target."""


class Struck(NamedTuple):
    """A fault that happened."""

    at: float
    """Seconds since the start of the soak test."""
    name: str
    whom: str


def _choose_except_veteran(machines: list[Machine], roll: random.Random) -> Machine:
    """Choose a machine other than the veteran, if there are several."""
    return roll.choice(machines[1:] or machines)


def _kill_worker(world: World, roll: random.Random) -> str:
    return _kill(world, _choose_except_veteran(world.machines.workers, roll))


def _kill_scheduler(world: World, roll: random.Random) -> str:
    return _kill(world, _choose_except_veteran(world.machines.schedulers, roll))


def _kill(world: World, machine: Machine) -> str:
    machine.signal_all(signal.SIGKILL)
    world.machines.replace(machine)
    return machine.name


def _kill_process(world: World, roll: random.Random) -> str:
    machine = _choose_except_veteran(world.machines.workers, roll)
    children = machine.children()
    if children:
        send(roll.choice(children), signal.SIGKILL)
    return machine.name


def _drain_worker(world: World, roll: random.Random) -> str:
    return _terminate(world, _choose_except_veteran(world.machines.workers, roll))


def _terminate_scheduler(world: World, roll: random.Random) -> str:
    return _terminate(world, _choose_except_veteran(world.machines.schedulers, roll))


def _terminate(world: World, machine: Machine) -> str:
    machine.signal(signal.SIGTERM)
    world.machines.replace(machine)
    return machine.name


def _stop_worker(world: World, roll: random.Random) -> str:
    return _stop(roll.choice(world.machines.workers), roll)


def _stop_scheduler(world: World, roll: random.Random) -> str:
    return _stop(roll.choice(world.machines.schedulers), roll)


def _stop(machine: Machine, roll: random.Random) -> str:
    """Pause a machine for a time that may exceed a lease and a worker's TTL."""
    with stopped(machine.pid):
        time.sleep(roll.uniform(1.0, 8.0))
    return machine.name


def _flush_redis(world: World, roll: random.Random) -> str:
    del roll
    flush_redis(world.services)
    return "Redis"


def _restart_redis(world: World, roll: random.Random) -> str:
    """Kill Redis, and restart it with its data on disk or empty."""
    keep = roll.random() < 0.5
    with redis_down(world.services, persistence=keep):
        pass
    return "Redis, data kept" if keep else "Redis, data lost"


def _restart_postgres(world: World, roll: random.Random) -> str:
    del roll
    with postgres_down(world.services):
        pass
    return "Postgres"


FAULTS = (
    Fault("kill worker machine", 3, _kill_worker),
    Fault("kill worker process", 4, _kill_process),
    Fault("drain worker", 3, _drain_worker),
    Fault("stop worker", 3, _stop_worker),
    Fault("kill scheduler", 3, _kill_scheduler),
    Fault("end scheduler", 3, _terminate_scheduler),
    Fault("stop scheduler", 3, _stop_scheduler),
    Fault("flush Redis", 2, _flush_redis),
    Fault("restart Redis", 2, _restart_redis),
    Fault("restart Postgres", 2, _restart_postgres),
)


class Misfortune:
    """Injects a fault every few seconds, in a thread, until stopped."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._random = random.Random(seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="misfortune")
        self.struck: list[Struck] = []
        self.broken: BaseException | None = None

    def start(self, began: float) -> None:
        """Start the thread; `began` is the monotonic time that counts as zero."""
        self._began = began
        self._thread.start()

    def stop(self) -> None:
        """Heal the active fault, and stop."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._random.uniform(3.0, 8.0)):
                fault = self._random.choices(FAULTS, [fault.weight for fault in FAULTS])[0]
                at = time.monotonic() - self._began
                self.struck.append(Struck(at, fault.name, fault.strike(self._world, self._random)))
                self._world.machines.mend()
        except BaseException as error:  # ends the soak test
            self.broken = error
            raise
