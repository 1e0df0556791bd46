"""What ticks cost the leader while runs of flows and DAGs of ten steps go on, so many of them in step.

    python -m tests.benchmarks.ticks --at-once 12 100 --rounds 9

The leader runs in this process, and only the time of the processor that its ticks take is counted: so neither what the
worker, Postgres and Redis take, nor a busy machine, changes much. Tasks are reported as soon as they are handed out.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from sqlalchemy import text

from orchestrator.embedded import EmbeddedServices
from orchestrator.store import database, driver
from orchestrator.store.runs import creation
from orchestrator.store.runs.creation import NewRun
from tests.benchmarks.flow_speed import STEPS, publish
from tests.integration.stage import System, Worker, fresh_system

_OPEN = text("SELECT count(*) FROM orchestrator.runs WHERE status <> 'success'")


def settle_down() -> None:
    """Collect garbage as seldom as a scheduler does."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def measured(system: System, worker: Worker, make: Callable[[], NewRun], number: int) -> dict[str, float]:
    """Let runs go through all their steps; return milliseconds a run, and statements a tick."""
    with system.engine.begin() as connection:
        creation.create(connection, [make() for _ in range(number)])
    system.app._client.backend.connections.nudge()  # type: ignore[attr-defined]
    used, ticks, sent = 0.0, 0, driver.statements_sent()
    idle = 0
    while idle < 3:
        began = time.thread_time()
        system.scheduler.tick()
        used += time.thread_time() - began
        ticks += 1
        taken = worker.take()
        idle = 0 if taken else idle + 1
        if taken:
            worker.succeed(*taken)
    with system.engine.connect() as connection:
        left = connection.execute(_OPEN).scalar_one()
    if left:
        raise AssertionError(f"{left} of the runs have not succeeded")
    return {"ms of CPU a run": 1000 * used / number, "statements a tick": (driver.statements_sent() - sent) / ticks}


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, nargs="+", default=[12, 100], help="runs that go on in step")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    report: dict[str, Any] = {"steps of each": STEPS, "rounds": options.rounds}
    with tempfile.TemporaryDirectory(prefix="ticks-") as folder:
        Path(folder).chmod(0o755)
        with EmbeddedServices(Path(folder) / "services") as services:
            database.upgrade(services.database_url)
            engine = database.engine_for(services.database_url)
            with fresh_system(engine, services.database_url, services.redis_url) as system:
                system.app.task(name="load.step")(lambda value=None: value)
                worker = system.worker(knows=("load.step",), slots=5_000)
                system.settle()
                made = publish(system.app)
                for number in options.at_once:
                    for kind in ("flow", "DAG"):
                        for _ in range(2):  # everything is loaded and planned
                            measured(system, worker, made[kind], number)
                        settle_down()
                        found = [measured(system, worker, made[kind], number) for _ in range(options.rounds)]
                        report[f"{kind}, {number} at once"] = {
                            name: round(median(one[name] for one in found), 3) for name in found[0]
                        }
            engine.dispose()
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
