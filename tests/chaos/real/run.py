"""One experiment: load and faults, then healing, rest, and checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg2

from tests.chaos.real import clocks, hosts
from tests.chaos.real.arena import IMPATIENT, Arena
from tests.chaos.real.checks import check, check_after_stop, overlaps, wait_for_rest
from tests.chaos.real.client import Client
from tests.chaos.real.driver import Driver
from tests.chaos.real.faults import left_out
from tests.chaos.real.plan import Strike, chosen, plan_for

READY_TIMEOUT = 150.0
REST_TIMEOUT = 120.0
"""Seconds within which all work must end once everything is healed; generous, for busy machines."""


_DONE_AND_OPEN = """
SELECT (SELECT count(*) FROM orchestrator.ended_tasks) AS done, (SELECT count(*) FROM orchestrator.tasks) AS open
"""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Parameters of an experiment. Equal values give the same load and faults; timing differs."""

    seed: int
    seconds: float = 60.0
    schedulers: int = 2
    workers: int = 3
    faults: tuple[str, ...] = ()
    """Faults or groups of faults; empty means all."""
    loads: tuple[str, ...] = ()
    """Kinds of loads; empty means all."""
    every: float = 2.0
    """Seconds between two faults, on average."""
    rate: float = 25.0
    """Submissions per second. A submission is a task, or a run of up to a hundred tasks."""

    def plan(self) -> list[Strike]:
        kinds = chosen(self.faults, without=left_out())
        return plan_for(self.seed, self.seconds, kinds, every=self.every, ttl=IMPATIENT["worker_ttl"])

    def command(self) -> str:
        """Return the command that repeats the experiment."""
        options = [
            f"--seed {self.seed} --seconds {self.seconds:g} --schedulers {self.schedulers} --workers {self.workers}",
            f"--every {self.every:g} --rate {self.rate:g}",
            *([f"--faults {','.join(self.faults)}"] if self.faults else ()),
            *([f"--loads {','.join(self.loads)}"] if self.loads else ()),
        ]
        return f"scripts/chaos {' '.join(options)}"


@dataclass(kw_only=True)
class Outcome:
    """The result of an experiment."""

    experiment: Experiment
    violations: list[str]
    faults: dict[str, int]
    submitted: dict[str, int]
    tasks: dict[str, int]
    runs: dict[str, int]
    executions: int
    losses: int
    """Attempts that were lost and dispatched again."""
    overlaps: int
    """Attempts that overlapped another attempt of their task, because its worker's heartbeats did not arrive."""
    seconds_to_rest: float
    history: list[str]

    def as_data(self) -> dict[str, Any]:
        return asdict(self) | {"command": self.experiment.command()}


@dataclass(frozen=True)
class Progress:
    """The progress of an experiment, for display."""

    seconds: float
    phase: str
    faults: int
    active: Sequence[str]
    done: int
    open: int


def run(experiment: Experiment, folder: Path, show: Callable[[Progress], None] = lambda _: None) -> Outcome:
    """Run an experiment and check it; the logs stay in `folder`."""
    plan = experiment.plan()
    arena = Arena(
        folder,
        schedulers=experiment.schedulers,
        workers=experiment.workers,
        hosts=hosts.are_permitted(),
        clocks=clocks.are_possible(),
    )
    with arena:
        driver = Driver(arena, plan)
        client = Client(arena, experiment.seed, experiment.rate, experiment.loads)
        began = _wait_until_ready(arena)

        def report(phase: str) -> None:
            with suppress(psycopg2.Error):  # Postgres is down
                counts = arena.sql(_DONE_AND_OPEN)[0]
                show(Progress(time.monotonic() - began, phase, driver.injected.total(), list(driver.active), **counts))

        client.start()
        driver.start()
        try:
            _run_load_and_faults(driver, client, began + experiment.seconds, lambda: report("chaos"))
            arena.heal()
            healed = time.monotonic()
            report("healing")
            client.wind_down()
            violations = wait_for_rest(arena, REST_TIMEOUT)
            seconds_to_rest = time.monotonic() - healed
        finally:
            client.close()
        report("at rest")
        violations += [*client.violations, *check(arena)]
        outcome = _outcome(experiment, arena, driver, client, violations, seconds_to_rest)
        outcome.violations += check_after_stop(arena, arena.stop_members())
        return outcome


def _run_load_and_faults(driver: Driver, client: Client, until: float, report: Callable[[], None]) -> None:
    """Wait while load and faults run, then stop both."""
    try:
        while not driver.wait(1.0) or time.monotonic() < until:
            report()
    finally:
        driver.stop()
        client.stop()


def _outcome(
    experiment: Experiment, arena: Arena, driver: Driver, client: Client, violations: list[str], seconds_to_rest: float
) -> Outcome:
    executions = arena.journal.executions()
    return Outcome(
        experiment=experiment,
        violations=violations,
        faults=dict(driver.injected),
        submitted=dict(client.counts),
        tasks=_counted(arena, "SELECT status, count(*) FROM orchestrator.ended_tasks GROUP BY 1"),
        runs=_counted(arena, "SELECT status, count(*) FROM orchestrator.runs GROUP BY 1"),
        executions=len(executions),
        losses=arena.sql("SELECT count(*) FROM orchestrator.attempts WHERE outcome = 'lost'")[0]["count"],
        overlaps=sum(excused for _, _, excused in overlaps(arena, executions)),
        seconds_to_rest=round(seconds_to_rest, 2),
        history=driver.history,
    )


def _wait_until_ready(arena: Arena) -> float:
    """Return the time when all processes are ready."""
    deadline = time.monotonic() + READY_TIMEOUT
    while not all(
        member.log.exists()
        and any(word in member.log.read_text() for word in ("scheduler.ready", "process.ready", "api.ready"))
        for member in arena.members
    ):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all processes were ready after {READY_TIMEOUT:g} s; their logs: {arena.folder}")
        time.sleep(0.05)
    return time.monotonic()


def _counted(arena: Arena, statement: str) -> dict[str, int]:
    return {row["status"]: row["count"] for row in arena.sql(statement)}
