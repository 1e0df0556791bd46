"""What the layer for Celery adds: CPU time of a call and of a result, by Celery's API and by ours, in turns.

    python tests/benchmarks/celery_layer.py

The smallest figure of all rounds is shown, because others on the machine can only add to it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator import TaskCancelled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=1_000)
    options = parser.parse_args()
    from orchestrator.embedded import EmbeddedServices

    with tempfile.TemporaryDirectory(prefix="celery-layer-") as folder:
        Path(folder).chmod(0o755)
        with EmbeddedServices(Path(folder) / "services") as services:
            os.environ["ORCHESTRATOR_DATABASE_URL"] = services.postgres.create_database("layer")
            os.environ["ORCHESTRATOR_REDIS_URL"] = services.redis_url
            measure(options.rounds, options.size)


def measure(rounds: int, size: int) -> None:
    """Enqueue and read results both ways, in turns; print microseconds of CPU time for each."""
    from orchestrator import Orchestrator
    from orchestrator.compat.celery import Celery
    from orchestrator.settings import load_settings
    from orchestrator.store import database

    database.upgrade(load_settings().require_database())
    ours, theirs = Orchestrator(), Celery("layer")
    native = ours.task(name="native.add")(lambda x, y: x + y)
    celery = theirs.task(name="layer.add")(lambda x, y: x + y)
    least: dict[str, float] = {}

    def taken(what: str, call: Callable[[], Any]) -> None:
        before = time.process_time()
        for _ in range(size):
            call()
        spent = (time.process_time() - before) / size * 1e6
        least[what] = min(spent, least.get(what, spent))

    ended = ended_task(native)
    for _ in range(rounds):
        taken("delay, Celery's", lambda: celery.delay(1, 2))
        taken("enqueue, ours", lambda: native.enqueue(1, 2))
        taken("result, ours", lambda: result_of(ours.handle(ended.id)))
        taken("get, Celery's", lambda: theirs.AsyncResult(ended.id).get(timeout=5, propagate=False))
    for what, spent in least.items():
        print(f"{what:20}{spent:8.1f} µs")
    ours.close()
    theirs.close()


def result_of(handle: Any) -> Any:
    """Return the result of a task, or the error in its place."""
    try:
        return handle.result(timeout=5)
    except TaskCancelled as error:
        return error


def ended_task(native: Any) -> Any:
    """Let a scheduler cancel a task, and so bring it to its end; return its handle."""
    ended = native.enqueue(1, 2)
    ended.cancel()
    scheduler = subprocess.Popen([sys.executable, "-m", "orchestrator", "scheduler"], stderr=subprocess.DEVNULL)
    try:
        with suppress(TaskCancelled):
            ended.result(timeout=60)
    finally:
        scheduler.terminate()
        scheduler.wait()
    return ended


if __name__ == "__main__":
    main()
