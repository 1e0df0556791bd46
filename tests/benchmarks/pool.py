"""What a worker process spends on a task beside its code: no-op tasks through a pool, without Redis.

    python tests/benchmarks/pool.py [--level info] [--tasks 60000]

Prints microseconds of processor time for each task. Compare two releases in turns, on an idle machine.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from typing import Any

from orchestrator import Orchestrator
from orchestrator.domain.tasks.task import Dispatch
from orchestrator.sdk.values.payload import encode_call
from orchestrator.telemetry import configure_logging
from orchestrator.workers.functions.allowed import Allowed
from orchestrator.workers.parent.held import HeldAttempts
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.pool import Pool
from orchestrator.workers.running.runner import Runner

_BATCH = 200


class _Reporter:
    """Counts reports, and lets go of what they end."""

    def __init__(self, held: HeldAttempts) -> None:
        self._held = held
        self.count = 0

    def report(self, report: Any, job: Job | None = None) -> None:
        del report
        if job is not None:
            self._held.drop(job.slot)
            self.count += 1

    def note(self, job: Job) -> None: ...

    def code_ended(self, job: Job) -> None: ...


def main() -> None:
    """Run the tasks, and print what they cost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--level", default="info")
    parser.add_argument("--tasks", type=int, default=60_000)
    options = parser.parse_args()
    configure_logging(options.level)
    app = Orchestrator(database_url="postgresql://nowhere/x", redis_url="redis://nowhere")
    app.task(name="noop")(lambda: None)
    held = HeldAttempts()
    reporter: Any = _Reporter(held)
    runner = Runner(app, reporter, Allowed(app, ()))
    isolation: Any = None
    pool = Pool(runner, isolation, reporter, held, concurrency=10, ttl=60.0, stop_grace=5.0, on_stuck=print)
    held.nod(time.monotonic() + 60.0)
    pool.start()
    payload = encode_call("noop", (), {}, 1_000)
    began = 0.0
    for first in range(-_BATCH * 20, options.tasks, _BATCH):
        if first == 0:
            began, reporter.count = time.process_time(), 0
        now = time.monotonic()
        held.nod(now)
        jobs = []
        for number in range(first, first + _BATCH):
            dispatch = Dispatch(number.to_bytes(16, "big", signed=True), 1, "noop", payload, "default")
            jobs.append(Job(dispatch, Bundle("", "", "", 1), held.add(dispatch.id, 1), now))
        before = reporter.count
        pool.submit(jobs)
        while reporter.count - before < _BATCH:
            pool.wait_until_idle(1.0)
    cost = (time.process_time() - began) / options.tasks
    print(f"{cost * 1e6:.2f} µs a task, log level {logging.getLevelName(logging.getLogger('orchestrator').level)}")


if __name__ == "__main__":
    main()
    os._exit(0)
