"""Latency of what happens one after another: steps of a workflow, a chain, one task, one enqueue; for some checkouts.

All of them run at the same time and take turns, so each round is a pair, and ratios are those of pairs. DBOS takes part
in the steps, on the same Postgres, if the interpreter of an environment that has it is given. With `--load`, so many
busy processes run beside. Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from tests.benchmarks.bench.programs import running
from tests.benchmarks.bench.services import Services, started

OURS = """
import gc, random, sys, time
import orchestrator.sdk.backend
from orchestrator import Orchestrator, WorkflowContext, chain
from orchestrator.store import database

app = Orchestrator()

@app.task
def noop() -> int:
    return 1

@app.workflow
async def sequence(ctx: WorkflowContext, steps: int) -> int:
    return sum([await noop.schedule() for _ in range(steps)])

def timed(function):
    began = time.perf_counter()
    function()
    return time.perf_counter() - began

def idle():
    time.sleep(random.uniform(0.002, 0.006))  # never in step with anything that ticks
    return timed(lambda: noop.enqueue().result(60))

def main():
    database.upgrade(app.settings.require_database())
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        size = int(line)
        steps, links = timed(lambda: sequence.start(size).result(300)), timed(
            lambda: chain([noop.si()] * size).start().result(300)
        )
        latencies = sorted(idle() for _ in range(size))
        single = timed(lambda: [noop.enqueue() for _ in range(size)])
        p50, p99 = (1000 * latencies[int(at * size)] for at in (0.5, 0.99))
        print(size / steps, 1000 * links / size, p50, p99, size / single, flush=True)
        noop.enqueue().result(60)
        time.sleep(0.2)

if __name__ == "__main__":
    main()
"""
DBOS = """
import os, sys, time
from dbos import DBOS, DBOSConfig

DBOS(config=DBOSConfig(name="steps", system_database_url=os.environ["BENCH_DATABASE_URL"], log_level="ERROR"))

@DBOS.step()
def noop() -> int:
    return 1

@DBOS.workflow()
def sequence(steps: int) -> int:
    return sum([noop() for _ in range(steps)])

DBOS.launch()
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    assert sequence(int(line)) == int(line)
    print(int(line) / (time.perf_counter() - began), flush=True)
"""
COLUMNS = ("steps/s", "chain, ms a step", "idle p50, ms", "idle p99, ms", "enqueue/s")


class Contestant:
    """A program that runs everything once for each line that it reads, and answers with a line of figures."""

    def __init__(self, command: Sequence[str | Path], folder: Path, environ: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=folder, env=environ, text=True, stdin=pipe, stdout=pipe)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._answers.readline()

    def measure(self, size: int) -> dict[str, float]:
        """Return a figure for each of the first columns."""
        print(size, file=self._requests, flush=True)
        return dict(zip(COLUMNS, map(float, self._answers.readline().split()), strict=False))

    def close(self) -> None:
        """End it."""
        self._requests.close()
        self._process.wait(20)


@contextmanager
def checkout(path: Path, services: Services, redis_url: str) -> Iterator[Contestant]:
    """Run a scheduler, a worker of two processes and a client, all of one checkout."""
    python = path.resolve() / ".venv/bin/python"
    folder, environ = services.fresh()
    environ |= {"ORCHESTRATOR_REDIS_URL": redis_url, "PYTHONPATH": f"{path.resolve()}:{folder}"}
    with running(folder, environ) as programs:
        (folder / "sequential.py").write_text(OURS)
        client = Contestant([python, folder / "sequential.py"], folder, environ)
        programs.start("scheduler", [python, "-P", "-m", "orchestrator", "scheduler"])
        worker = ["worker", "--app", "sequential:app", "--processes", "2"]
        programs.start("worker", [python, "-P", "-m", "orchestrator", *worker])
        client.measure(100)  # the first run waits for the workers, and has everything planned
        yield client
        client.close()


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Have so many processes compute."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    repository = Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[repository], help="folders with a `.venv` each")
    parser.add_argument("--dbos", type=Path, metavar="PYTHON", help="the interpreter of an environment with DBOS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=200, help="steps, or tasks, of a round")
    parser.add_argument("--load", type=int, default=0, help="busy processes beside")
    options = parser.parse_args()

    contestants: dict[str, Contestant] = {}
    with ExitStack() as stack:
        services = stack.enter_context(started())
        for path in options.checkouts:
            redis = stack.enter_context(started())  # of its own: channels are shared by all databases of a Redis
            ours = checkout(path, services, redis.embedded.redis_url)
            contestants[str(path)] = stack.enter_context(ours)
        if options.dbos:
            folder, environ = services.fresh()
            folder.mkdir()
            contestants["DBOS"] = dbos = Contestant([options.dbos, "-c", DBOS], folder, environ)
            stack.callback(dbos.close)
            dbos.measure(100)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
        stack.enter_context(busy(options.load))
        for number in range(options.rounds):
            for name in contestants if number % 2 == 0 else reversed(contestants):
                found[name].append(contestants[name].measure(options.size))
        print(json.dumps(found))
    _report(found)


def _report(found: dict[str, list[dict[str, float]]]) -> None:
    """Print medians, and the median of the ratios to the first."""
    first = next(iter(found.values()))
    for name, rounds in found.items():
        print(f"\n{name}")
        for column in (column for column in COLUMNS if column in rounds[0]):
            ratio = median(mine[column] / its[column] for mine, its in zip(rounds, first, strict=True))
            print(f"  {column:20}{median(row[column] for row in rounds):10,.2f}{ratio:10.2f} of the first")


if __name__ == "__main__":
    main()
