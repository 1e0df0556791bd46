"""Flows: ten steps beside a DAG and code of the same, a loop of thousands, and thousands of approvals that wait.

    python -m tests.benchmarks.flows --runs 1000 --rounds 3 --loop 10000 --approvals 5000

A part that is given 0 is left out. It ends with 1 if waiting approvals cost more than docs/performance.md promises.
Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from orchestrator import Orchestrator
from tests.benchmarks.executions import _resident
from tests.benchmarks.flow_speed import PROGRAM, crowd, loop, thread_time
from tests.benchmarks.listeners import Server, _cpu

GROWTH, IDLE = 10.0, 0.3
"""What is promised: MB that the scheduler grows by at most, and seconds of CPU in ten while all wait."""
PATIENCE = 600.0


class Scene:
    """A scheduler and a worker of two processes on services of their own."""

    def __init__(self, stack: ExitStack) -> None:
        from orchestrator.embedded import EmbeddedServices
        from orchestrator.store import database

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flows-")))
        folder.chmod(0o755)
        (folder / "load.py").write_text(PROGRAM, encoding="utf-8")
        services = stack.enter_context(EmbeddedServices(folder / "services"))
        database.upgrade(services.database_url)
        environment = os.environ | {
            "ORCHESTRATOR_DATABASE_URL": services.database_url,
            "ORCHESTRATOR_REDIS_URL": services.redis_url,
        }
        os.environ.update(environment)
        self.scheduler = Server(folder, environment, "scheduler")
        stack.callback(self.scheduler.stop)
        self._worker = Server(folder, environment, "worker", "--app", "load:app", "--processes", "2")
        stack.callback(self._worker.stop)
        self._services = services
        sys.path.insert(0, str(folder))
        import load  # type: ignore[import-not-found]

        self.app: Orchestrator = load.app
        stack.callback(self.app.close)

    def cpu(self) -> float:
        """Return the seconds of CPU that the scheduler has used."""
        return thread_time(self.scheduler.process.pid)

    def others(self) -> dict[str, float]:
        """Return those that the other processes have used."""
        postgres, redis = self._services.postgres.pid, self._services.redis.pid
        return {"worker": self._worker.cpu, "Postgres": _cpu(postgres), "Redis": _cpu(redis)}

    def memory(self) -> float:
        return _resident(self.scheduler.process.pid)


def _until(condition: Callable[[], bool], what: str) -> None:
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > PATIENCE:
            raise TimeoutError(f"{what}: not after {PATIENCE:g} s")
        time.sleep(0.1)


def waiting(scene: Scene, options: Any) -> dict[str, Any]:
    """Let approvals wait, look at what that costs, and give them all."""
    flows = scene.app.flows
    flows.publish("ask", {"start": "ask", "nodes": {"ask": {"kind": "approval"}}})
    flow = flows["ask"]
    for run in [flow.start() for _ in range(options.approvals // 10)]:  # everything is loaded, and has its size
        run.approve(node="ask")
        run.result(timeout=PATIENCE)
    before, began = scene.memory(), time.monotonic()
    runs = [flow.start() for _ in range(options.approvals)]
    _until(lambda: runs[-1].cursor() == "ask", "the last waits")
    found: dict[str, Any] = {"approvals": len(runs), "s until all wait": round(time.monotonic() - began, 1)}
    time.sleep(2.0)
    used = scene.cpu()
    time.sleep(10.0)
    found["s of CPU in ten"] = round(scene.cpu() - used, 2)
    found["MB more"] = round(scene.memory() - before, 1)
    for run in runs:
        run.approve()
    for run in runs:
        run.result(timeout=PATIENCE)
    found["good"] = found["s of CPU in ten"] <= IDLE and found["MB more"] < GROWTH
    return found


def main() -> None:
    """Measure, print JSON, and end with 1 if a promise is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1_000, help="of ten steps, of each kind and in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loop", type=int, default=10_000, help="steps of one run")
    parser.add_argument("--approvals", type=int, default=5_000)
    options = parser.parse_args()
    found: dict[str, Any] = {"load before": os.getloadavg()[0]}
    with ExitStack() as stack:
        scene = Scene(stack)
        if options.runs:
            found["ten steps"] = crowd(scene, options.runs, options.rounds)
        if options.loop:
            found["loop"] = loop(scene, options.loop)
        if options.approvals:
            found["waiting"] = waiting(scene, options)
    print(json.dumps(found, indent=2))
    sys.exit(0 if found.get("waiting", {"good": True})["good"] else 1)


if __name__ == "__main__":
    main()
