"""What it costs that tasks say something: a thousand of them a second, silent and with a line each, by process.

CPU time says more than rates do on a machine that others use too. The cases take turns, each has a database of its own,
and the smallest figure of all rounds is shown, because others can only add to it. `docs/performance.md` holds the
findings. Linux only; `python -m tests.benchmarks.logs [CHECKOUT…]`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import text

from orchestrator import Orchestrator, Settings
from orchestrator.embedded import EmbeddedServices
from orchestrator.store import database
from tests.benchmarks.together import _cpu, _said, _stopped_at_the_end

REPOSITORY = Path(__file__).resolve().parents[2]
APPLICATION = """
from orchestrator import Orchestrator

app = Orchestrator()


@app.task(name="silent")
def silent(value):
    return 1


@app.task(name="prints")
def prints(value):
    print("this is line", value, "of a task that says something of about eighty characters.")
"""
PARTS = ("scheduler", "worker", "postgres", "redis")


class Case(NamedTuple):
    """What tasks do, and what is kept of it."""

    name: str
    task: str
    capture: str


CASES = (
    Case("silent", "silent", "all"),
    Case("a line each, not kept", "prints", "off"),
    Case("a line each, kept", "prints", "all"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[REPOSITORY])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--rate", type=int, default=1_000, help="tasks a second")
    options = parser.parse_args()
    found: dict[tuple[Path, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="logs-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "application.py").write_text(APPLICATION)
        with EmbeddedServices(folder / "services") as services:
            servers = {"postgres": services.postgres.pid, "redis": services.redis.pid}
            for _ in range(options.rounds):
                for case in CASES:
                    for checkout in options.checkouts:
                        if (checkout / "orchestrator/store/logs.py").exists() or case.capture == "all":
                            url = services.postgres.create_database(f"turn_{os.urandom(6).hex()}")
                            turn = _turn(case, checkout, folder, url, services.redis_url, servers, options)
                            found.setdefault((checkout, case.name), []).append(turn)
    for (checkout, name), turns in found.items():
        least = [min(turn[part] for turn in turns) for part in PARTS]
        seconds, lines = min(turn["seconds"] for turn in turns), max(turn["lines"] for turn in turns)
        figures = "".join(f"{part} {value:.0f}, " for part, value in zip(PARTS, least, strict=True))
        print(f"{checkout} {name}: µs a task of {figures}all ended after {seconds:.1f} s, {lines:,.0f} lines kept")


def _turn(
    case: Case,
    checkout: Path,
    folder: Path,
    url: str,
    redis_url: str,
    servers: Mapping[str, int],
    options: argparse.Namespace,
) -> dict[str, float]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout.resolve()),
        "ORCHESTRATOR_DATABASE_URL": url,
        "ORCHESTRATOR_REDIS_URL": redis_url,
        "ORCHESTRATOR_CAPTURE_LOGS": case.capture,
        "ORCHESTRATOR_NAMESPACE": f"n{os.urandom(4).hex()}",
    }
    orchestrator = [sys.executable, "-P", "-m", "orchestrator"]
    subprocess.run([*orchestrator, "db", "upgrade"], env=environment, cwd=folder, check=True, capture_output=True)
    parts = dict(servers)
    with _stopped_at_the_end() as running:
        for name, words, ready in (
            ("scheduler", ["scheduler"], "scheduler.ready"),
            ("worker", ["worker", "--app", "application:app", "--processes", "1"], ""),
        ):
            log = folder / f"{name}.log"
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*orchestrator, *words], env=environment, cwd=folder, stdout=output, stderr=output
                )
            running.append(process)
            parts[name] = process.pid
            _said(log, ready, process)
        return _measure(case, environment, parts, options)


def _measure(
    case: Case, environment: Mapping[str, str], parts: Mapping[str, int], options: argparse.Namespace
) -> dict[str, float]:
    schema = environment["ORCHESTRATOR_NAMESPACE"]
    url = environment["ORCHESTRATOR_DATABASE_URL"]
    settings = Settings(database_url=url, redis_url=environment["ORCHESTRATOR_REDIS_URL"], namespace=schema)
    size = options.rate * options.seconds
    with Orchestrator(settings) as app:
        engine = database.engine_for(url, autocommit=True)
        task = app.task(name=case.task)(lambda value: value)
        task.enqueue(0).result(60)
        before = {part: _cpu(process) for part, process in parts.items()}
        begun = time.monotonic()
        for number in range(10 * options.seconds):
            app.enqueue_many(task, [(value,) for value in range(options.rate // 10)])
            time.sleep(max(0.0, begun + (number + 1) / 10 - time.monotonic()))
        with engine.connect() as connection:

            def count(what: str) -> float:
                return float(connection.execute(text(f"SELECT count(*) FROM {schema}.{what}")).scalar_one())

            while count("ended_tasks") <= size:
                time.sleep(0.2)
            seconds = time.monotonic() - begun
            has_lines = connection.execute(text(f"SELECT to_regclass('{schema}.task_logs')")).scalar_one() is not None
            give_up_at = time.monotonic() + 10
            while case == CASES[-1] and has_lines and count("task_logs") <= size and time.monotonic() < give_up_at:
                time.sleep(0.2)
            lines = count("task_logs") if has_lines else 0.0
        used = {part: (_cpu(process) - before[part]) / size * 1e6 for part, process in parts.items()}
        engine.dispose()
    return {**used, "seconds": seconds, "lines": lines}


if __name__ == "__main__":
    main()
