"""What an enqueue costs: CPU time of the client, of Postgres and of Redis, for one or more checkouts of the package.

CPU time says more than rates do on a machine that others use too. The checkouts take turns, each turn has a database of
its own, and the smallest figure of all rounds is shown, because others can only add to it. `docs/performance.md` holds
the findings. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
LARGE = {f"field {number}": "v" * 20 for number in range(40)}
WIDE = [{"id": number, "name": f"row {number}", "price": number * 1.5} for number in range(300)]
COLUMNS = ("client", "postgres", "redis", "elapsed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[REPOSITORY])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, default=2_000, help="single enqueues; ten times as many in bulk")
    parser.add_argument("--client", nargs=2, metavar=("POSTGRES", "REDIS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        print(json.dumps(measure(options.size, *map(int, options.client))))
    else:
        compare(options.checkouts, options.rounds, options.size)


def compare(checkouts: Sequence[Path], rounds: int, size: int) -> None:
    """Let the checkouts take turns, and show what each of them took."""
    from orchestrator.embedded import EmbeddedServices

    found: dict[Path, list[dict[str, list[float]]]] = {checkout: [] for checkout in checkouts}
    with tempfile.TemporaryDirectory(prefix="enqueueing-") as folder:
        Path(folder).chmod(0o755)
        with EmbeddedServices(Path(folder) / "services") as services:
            servers = [str(services.postgres.pid), str(services.redis.pid)]
            for number in range(rounds):
                for checkout in checkouts if number % 2 == 0 else reversed(checkouts):
                    url = services.postgres.create_database(f"turn_{number}_{len(found[checkout])}_{id(checkout)}")
                    environment = {
                        **os.environ,
                        "PYTHONPATH": str(checkout.resolve()),
                        "ORCHESTRATOR_DATABASE_URL": url,
                        "ORCHESTRATOR_REDIS_URL": services.redis_url,
                    }
                    command = [sys.executable, __file__, "--size", str(size), "--client", *servers]
                    done = subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True)
                    found[checkout].append(json.loads(done.stdout))
    for checkout, turns in found.items():
        print(f"\n{checkout}, µs a task: {', '.join(COLUMNS)}")
        for case in turns[0]:
            least = [min(turn[case][place] for turn in turns) for place in range(len(COLUMNS))]
            print(f"  {case:26}" + "".join(f"{value:10.1f}" for value in least))


def measure(size: int, postgres: int, redis: int) -> dict[str, list[float]]:
    """Enqueue in every way; return what a task takes of each process, in microseconds."""
    from orchestrator import Orchestrator
    from orchestrator.settings import load_settings
    from orchestrator.store import database

    database.upgrade(load_settings().require_database())
    app = Orchestrator()
    task = app.task(name="noop")(lambda value: value)

    def one_by_one(count: int, value: object, **options: Any) -> None:
        for _ in range(count):
            (task.options(**options) if options else task).enqueue(value)

    cases: dict[str, tuple[int, Callable[[int], object]]] = {
        "one by one": (size, lambda count: one_by_one(count, 1)),
        "with options": (size, lambda count: one_by_one(count, 1, priority=1)),
        "1 kB": (size, lambda count: one_by_one(count, LARGE)),
        "8 kB, 300 records": (size, lambda count: one_by_one(count, WIDE)),
        "enqueue_many": (size * 10, lambda count: app.enqueue_many(task, [(1,)] * count)),
        "enqueue_many, 1 kB": (size * 5, lambda count: app.enqueue_many(task, [(LARGE,)] * count)),
        "start_many": (size * 10, lambda count: app.start_many(task, [(1,)] * count)),
    }
    found = {}
    for case, (count, enqueue) in cases.items():
        enqueue(10)  # connections are open, statements known
        servers = [[postgres, *_children(postgres)], [redis]]
        before = _clocks(servers)
        enqueue(count)
        found[case] = [(after - start) / count * 1e6 for start, after in zip(before, _clocks(servers), strict=True)]
    app.close()
    return found


def _clocks(servers: list[list[int]]) -> list[float]:
    return [time.process_time(), *(sum(map(_cpu, processes)) for processes in servers), time.perf_counter()]


def _cpu(process: int) -> float:
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e9
    except FileNotFoundError:
        return 0.0  # a worker of autovacuum, gone again


def _children(parent: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


if __name__ == "__main__":
    main()
