"""Size and response time of every page of the dashboard, with 20,000 tasks, DAGs of 2,000 and 10,000 steps (the
maximum), and a run of 20,000 tasks.

    python -m tests.benchmarks.pages

It exits with 1 if a page exceeds its limits. `docs/performance.md` has the findings.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import psycopg2
from rich.console import Console
from rich.table import Table

from orchestrator.api.app import create_app
from orchestrator.api.dashboard.paths import PAGES
from orchestrator.domain.dag.state import DagState, Fan, StepState
from orchestrator.embedded import EmbeddedServices
from orchestrator.sdk.backend import Backend
from orchestrator.sdk.dag import definitions
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.values.payload import encode_value
from orchestrator.settings import load_settings
from orchestrator.store.database import upgrade
from tests.benchmarks import lists

LAYERS = 20
_STEPS = """
INSERT INTO orchestrator.ended_tasks (id, seq, name, queue, priority, status, attempt, failures, losses, payload,
                                      worker, created_at, started_at, ended_at, run_id, step, position, result)
SELECT gen_random_uuid(), n, 'etl.part', 'etl', 0, CASE WHEN n = 7 THEN 'failed' ELSE 'success' END, 1, 0, 0, '', 'w-1',
       now() - interval '1 hour', now() - interval '1 hour' + n * interval '10 ms',
       now() - interval '1 hour' + (n + 100) * interval '10 ms', %(run)s,
       coalesce(%(step)s::text, 'part_' || n), CASE WHEN %(step)s::text IS NULL THEN 0 ELSE n END, %(output)s
  FROM generate_series(0, %(last)s) AS n
"""


@dataclass(frozen=True)
class Bar:
    """The limits of a page."""

    milliseconds: float = 300
    kilobytes: float = 300


BARS = {10_000: Bar(1_000, 1_000)}
COMPARED = WIDE = Bar(1_000, 300)


def upstream_steps(number: int, width: int) -> list[str]:
    """Return the one or two steps of the previous layer that a step depends on."""
    return sorted({f"part_{number - width - more}" for more in (0, number % 2) if number - width - more >= 0})


def start(backend: Backend, url: str, steps: int, done: int, version: int = 0) -> str:
    """Store a partly completed run of a DAG; return its id. Every output of a version differs from other versions."""
    width = steps // LAYERS
    more = {"retries": version} if version else {}
    tasks = {
        f"part_{number}": {
            "task": "etl.part",
            "depends_on": upstream_steps(number, width),
            **(more if number % 3 else {}),
        }
        for number in range(steps)
    }
    name = f"dag-{steps}"
    backend.workflows.apply(definitions.from_data({"name": name, "queue": "etl", "tasks": tasks}))
    run = backend.workflows.start(name, {}, new_id(), key=None, tags=())
    state = DagState(bytes([StepState.SUCCESS] * done + [StepState.WAITING] * (steps - done)))
    write(url, run, steps, done, state, version)
    return run.hex()


def start_wide(backend: Backend, url: str, items: int) -> str:
    """Store a run with one step of `items` tasks, half of them done; return its id."""
    tasks = {"each": {"task": "etl.part", "foreach": "params.items"}}
    body = {"name": "wide", "queue": "etl", "params": {"items": {"type": "list"}}, "tasks": tasks}
    backend.workflows.apply(definitions.from_data(body))
    run = backend.workflows.start("wide", {"items": [1]}, new_id(), key=None, tags=())
    fan = Fan(items, created=items, success=items // 2 - 1, failed=1)
    write(url, run, items, items // 2, DagState(bytes([StepState.OPEN]), {0: fan}), 0, "each")
    return run.hex()


def write(url: str, run: bytes, total: int, done: int, state: DagState, version: int, step: str | None = None) -> None:
    """Store the ended tasks of a run, and its progress."""
    output = encode_value({"rows": [number * (version + 1) % 997 for number in range(1_000)]}, "an output", 1_000_000)
    connection = psycopg2.connect(url)
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute(_STEPS, {"run": run.hex(), "output": output, "last": done - 1, "step": step})
        cursor.execute(
            "UPDATE orchestrator.runs SET status = %s, started_at = now(), total = %s, open = %s, success = %s,"
            " state = %s WHERE id = %s",
            (
                *("success" if done == total else "running", total, total - done, done),
                *(msgspec.msgpack.encode(state), run.hex()),
            ),
        )
        cursor.execute("ANALYZE")
    connection.close()


async def measure(app: object, pages: dict[str, Bar], times: int) -> list[tuple[str, Bar, float, float, float]]:
    """Read every page several times; return its minimum wall and CPU times in milliseconds, and its kilobytes."""
    found = []
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 40_000))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600) as client:
        await client.get("/ui")
        for path, bar in pages.items():
            durations, busy = [], []
            for _ in range(times):
                began, began_busy = time.perf_counter(), time.process_time()
                response = (await client.get(path)).raise_for_status()
                durations.append(1_000 * (time.perf_counter() - began))
                busy.append(1_000 * (time.process_time() - began_busy))
            found.append((path, bar, min(durations), min(busy), len(response.content) / 1_000))
    return found


def main() -> int:
    """Fill the database, measure, and print the pages with their limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pages-") as folder, EmbeddedServices(Path(folder)) as services:
        url = services.postgres.create_database("pages")
        upgrade(url)
        lists.fill(url, options.tasks, options.tasks, options.tasks // 10)
        settings = load_settings(environ={}, database_url=url, redis_url=services.redis_url)
        fixed = [
            page.path for page in PAGES if page.method == "GET" and not page.is_live and page.media_type == "text/html"
        ]
        pages = {path: Bar() for path in fixed if "{" not in path and not re.search("static|login|log.txt", path)}
        pages["/ui/queues/queue7"] = pages["/ui/tasks?status=failed"] = Bar()
        backend = Backend(settings)
        for steps in (2_000, 10_000):
            first, last = start(backend, url, steps, steps), start(backend, url, steps, steps // 2, 1)
            bar = BARS.get(steps, Bar())
            pages |= dict.fromkeys((f"/ui/runs/{last}", f"/ui/workflows/dag-{steps}"), bar)
            pages[f"/ui/compare?run={first}&run={last}"] = COMPARED
        pages |= dict.fromkeys((f"/ui/runs/{start_wide(backend, url, 20_000)}", "/ui/workflows/wide"), WIDE)
        backend.close()
        found = asyncio.run(measure(create_app(settings), pages, options.times))
    table = Table("page", "ms", "CPU ms", "kB", "bar")
    missed = 0
    for path, bar, milliseconds, busy, kilobytes in found:
        is_missed = milliseconds > bar.milliseconds or kilobytes > bar.kilobytes
        missed += is_missed
        limits = f"{'MISSED ' if is_missed else ''}{bar.milliseconds:g} ms, {bar.kilobytes:g} kB"
        table.add_row(path, f"{milliseconds:.0f}", f"{busy:.0f}", f"{kilobytes:.0f}", limits)
    Console(width=120).print(table)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
