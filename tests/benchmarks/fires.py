"""What it costs to fire many schedules that are due in the same minute, and how long others wait meanwhile.

    python -m tests.benchmarks.fires --schedules 20000 --workflows 1

First, the leader runs in this process, and its fires are counted: what each costs the leader and Postgres in CPU time,
which says more than the rate does on a machine that others use too. A fire is complete when its run has begun and its
task is ready; no worker takes it.

Then a scheduler and a worker run as they do elsewhere, and a client enqueues tasks of another queue, one after the
other: how long each takes from its enqueue to its result, before the schedules are due and while they fire.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import quantiles
from typing import Any

from sqlalchemy import Engine, TextClause, text

from orchestrator.domain.dag.definition import Definition, Param, Step
from orchestrator.domain.schedules.schedule import Schedule
from orchestrator.embedded import EmbeddedServices
from orchestrator.store import database, driver
from orchestrator.store.dag import workflows
from orchestrator.store.schedules import definitions as schedules
from tests.benchmarks.bench.programs import running
from tests.benchmarks.bench.remote import RemoteClient
from tests.benchmarks.bench.services import Services, started
from tests.benchmarks.peers.contestants import OURS
from tests.integration.stage import System, fresh_system

_DUE = text("UPDATE orchestrator.schedules SET next_fire = date_trunc('minute', now()), due_at = now()")
_MORE = text("""
INSERT INTO orchestrator.schedules (workflow, name, definition, declared, paused, next_fire, due_at)
SELECT 'job-' || n % :workflows, 's' || n,
       s.definition || jsonb_build_object('name', 's' || n, 'params', jsonb_build_object('value', n)), false, false,
       s.next_fire, s.due_at
  FROM generate_series(1, :schedules) AS n CROSS JOIN orchestrator.schedules s WHERE s.name = 'first'
""")
_LEFT = text("SELECT EXISTS (SELECT FROM orchestrator.schedules WHERE due_at <= now() AND NOT paused)")
_READY = text("SELECT count(*) FROM orchestrator.tasks WHERE status = 'pending'")
_ALL = text("TRUNCATE orchestrator.tasks, orchestrator.runs")


def fill(engine: Engine, number: int, different: int) -> None:
    """Store so many schedules of so many workflows, each of one task."""
    with engine.begin() as connection:
        for one in range(different):
            step = Step(name="task", task="load.step", input={"value": "${params.value}"})
            params = {"value": Param(default=1)}
            job = Definition(name=f"job-{one}", params=params, steps=(step,), queue="fired")
            workflows.apply(connection, job)
        first = Schedule(name="first", cron="0 0 * * *", params={"value": 7})
        schedules.put(connection, "job-0", first, datetime.now(UTC))
        connection.execute(_MORE, {"schedules": number - 1, "workflows": different})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE orchestrator.schedules"))


def measured(system: System, number: int) -> dict[str, float]:
    """Fire all of them once."""
    with system.engine.begin() as connection:
        connection.execute(_ALL)
        connection.execute(_DUE)
    backends = _backends(system.engine)
    used = time.process_time()
    stored, sent = _cpu(backends), driver.statements_sent()
    began, longest, is_left = time.monotonic(), 0.0, True
    while is_left:
        for _ in range(10):
            tick = time.monotonic()
            system.scheduler.tick()
            longest = max(longest, time.monotonic() - tick)
        is_left = _asked(system.engine, _LEFT)
    took = time.monotonic() - began
    figures = {
        "fires a second": number / took,
        "leader µs a fire": (time.process_time() - used) / number * 1e6,
        "Postgres µs a fire": (_cpu(backends) - stored) / number * 1e6,
        "longest tick ms": 1000 * longest,
        "statements per 1,000 fires": (driver.statements_sent() - sent) / number * 1000,
    }
    assert _asked(system.engine, _READY) == number
    return figures


def _asked(engine: Engine, question: TextClause) -> Any:
    with engine.connect() as connection:
        return connection.execute(question).scalar_one()


def waits(services: Services, number: int, different: int) -> dict[str, Any]:
    """Fire all of them once, in processes of their own; return what tasks of another queue take meanwhile."""
    folder, environ = services.fresh()
    with running(folder, environ) as programs:
        client = RemoteClient(programs, OURS)
        client.ask("prepare")
        programs.start("scheduler", [OURS.python, *OURS.scheduler])
        client.ask("wait_until_ready")
        for command in OURS.commands():
            programs.start("worker", command)
        engine = database.engine_for(environ["BENCH_DATABASE_URL"])
        fill(engine, number, different)
        quiet = client.ask("idle_latencies", 200)
        with engine.begin() as connection:
            connection.execute(_DUE)
        began, meanwhile = time.monotonic(), []
        while _asked(engine, _LEFT):
            meanwhile += client.ask("idle_latencies", 10)
        took = time.monotonic() - began
        assert _asked(engine, _READY) == number
        engine.dispose()
    return {"fires a second": number / took, "quiet, ms": _percentiles(quiet), "meanwhile, ms": _percentiles(meanwhile)}


def _percentiles(latencies: list[float]) -> dict[str, float]:
    cuts = quantiles(latencies, n=20, method="inclusive")
    found = {"p50": cuts[9], "p95": cuts[18], "max": max(latencies)}
    return {name: round(1000 * seconds, 1) for name, seconds in found.items()}


def _backends(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT pid FROM pg_stat_activity WHERE datname IS NOT NULL")).scalars())


def _cpu(processes: list[int]) -> float:
    return sum(int(Path(f"/proc/{one}/schedstat").read_text().split()[0]) for one in processes) / 1e9


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--workflows", type=int, default=1, help="that these schedules start")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="show where the leader spends its time, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fires-") as folder:
        Path(folder).chmod(0o755)
        with EmbeddedServices(Path(folder) / "services") as embedded:
            database.upgrade(embedded.database_url)
            engine = database.engine_for(embedded.database_url)
            with fresh_system(engine, embedded.database_url, embedded.redis_url) as system:
                system.clock = time.monotonic  # type: ignore[assignment]  # a budget needs a clock that goes
                system.lead()
                while system.scheduler.term.fleet.in_grace:
                    system.tick()
                fill(engine, options.schedules, options.workflows)
                gc.collect()  # and then as seldom as a scheduler does
                gc.freeze()
                gc.set_threshold(20_000, 20, 20)
                found = [measured(system, options.schedules) for _ in range(options.rounds)]
                figures: dict[str, Any] = {name: [round(one[name], 1) for one in found] for name in found[0]}
                print(json.dumps(figures, indent=2, ensure_ascii=False))
                if options.profile:
                    profile = cProfile.Profile()
                    profile.runcall(measured, system, options.schedules)
                    pstats.Stats(profile).sort_stats("tottime").print_stats(45)
            engine.dispose()
    with started() as services:
        print(json.dumps(waits(services, options.schedules, options.workflows), indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
