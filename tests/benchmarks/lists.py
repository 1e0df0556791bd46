"""Response time of each page of each list over HTTP with millions of rows: from the first page to the thousandth.

    python -m tests.benchmarks.lists --ended 5000000 --open 1000000 --runs 1000000

`docs/performance.md` has the findings.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psycopg2
from rich.console import Console
from rich.progress import track
from rich.table import Table

from orchestrator.api.app import create_app
from orchestrator.embedded import EmbeddedServices
from orchestrator.settings import load_settings
from orchestrator.store.database import upgrade

# Ids sort by time like the product's: a thousand rows per half second, the newest now.
_ID = """(lpad(to_hex((extract(epoch FROM %(now)s::timestamptz) * 1000)::bigint - ({total} - n) / 2), 12, '0')
          || '7' || lpad(to_hex(n %% 4096), 3, '0') || 'a' || lpad(to_hex(n), 15, '0'))::uuid"""
_AT = "%(now)s::timestamptz - make_interval(secs => ({total} - n) / 2000.0)"
_ENDED = """
INSERT INTO orchestrator.ended_tasks (id, seq, name, queue, priority, status, reason, attempt, failures, losses,
       payload, result, error, worker, created_at, started_at, ended_at, run_id, step, position)
SELECT {id}, n, CASE WHEN n %% 1000000 = 7 THEN 'app.rare' ELSE 'app.task' || n %% 50 END,
       CASE WHEN n %% 1000000 = 9 THEN 'rare' ELSE 'queue' || n %% 20 END, 0,
       CASE WHEN n %% 100 = 3 THEN 'failed' WHEN n %% 1000000 = 5 THEN 'cancelled' ELSE 'success' END,
       CASE WHEN n %% 100 = 3 THEN 'failed' END, 1, 0, 0, %(payload)s, %(payload)s,
       CASE WHEN n %% 100 = 3 THEN jsonb_build_object('kind', 'ValueError', 'traceback', repeat('line of code ', 40),
            'message', CASE WHEN n %% 1000000 = 3 THEN 'rare words' ELSE 'wrong number ' || n END) END,
       'host-1-abc', {at}, {at}, {at} + interval '1 s',
       CASE WHEN n / 100 %% 2 = 0 AND n / 5 < {runs} THEN {run} END, 'step' || n %% 5, 0
  FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
"""
_OPEN = """
INSERT INTO orchestrator.tasks (id, name, queue, priority, payload, created_at)
SELECT {id}, CASE WHEN n %% 1000000 = 7 THEN 'app.rare_open' ELSE 'app.task' || n %% 50 END, 'queue' || n %% 20, 0,
       %(payload)s, {at}
  FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
"""
_RUNS = """
INSERT INTO orchestrator.runs (id, name, status, total, open, success, failed, cancelled, skipped, created_at,
       started_at, ended_at, workflow, version, tags, params)
SELECT {id}, 'workflow' || n %% 30, CASE WHEN n %% 40 = 0 THEN 'failed' ELSE 'success' END, 5, 0, 5, 0, 0, 0, {at},
       {at}, {at} + interval '1 s', CASE WHEN n %% 1000000 = 7 THEN 'rare' ELSE 'workflow' || n %% 30 END, 1,
       ARRAY['customer' || n %% 1000, CASE WHEN n %% 2 = 0 THEN 'even' ELSE 'odd' END], '{{}}'
  FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
"""

# Rows as leaders write them.
THROUGHPUT = """
INSERT INTO orchestrator.throughput
SELECT bucket, 'queue' || queue, 1, 990, 10, 0, 0, 1000, 0, 0, array_fill(50, ARRAY[19]), array_fill(50, ARRAY[19])
  FROM generate_series(date_bin('10 s', now(), 'epoch') - interval '1 hour', now(), interval '10 s') AS bucket
 CROSS JOIN generate_series(0, 19) AS queue
"""


@dataclass(frozen=True)
class Case:
    """A list with its filters."""

    path: str
    query: Mapping[str, str | Sequence[str]]

    def __str__(self) -> str:
        return self.path + (
            "?" + "&".join(f"{name}={value}" for name, value in self.query.items()) if self.query else ""
        )


TASKS, RUNS = "/api/v1/tasks", "/api/v1/runs"
CASES = (
    Case(TASKS, {}),
    Case(TASKS, {"status": "pending"}),
    Case(TASKS, {"status": "running"}),
    Case(TASKS, {"status": "success"}),
    Case(TASKS, {"status": "failed"}),
    Case(TASKS, {"status": "cancelled"}),
    Case(TASKS, {"queue": "queue7"}),
    Case(TASKS, {"queue": "rare"}),
    Case(TASKS, {"queue": "none"}),
    Case(TASKS, {"name": "app.task7"}),
    Case(TASKS, {"name": "app.rare"}),
    Case(TASKS, {"name": "app.none"}),
    Case(TASKS, {"name": "app.task7", "queue": "queue7", "status": "failed"}),
    Case(RUNS, {}),
    Case(RUNS, {"status": "failed"}),
    Case(RUNS, {"status": "cancelled"}),
    Case(RUNS, {"workflow": "workflow7"}),
    Case(RUNS, {"workflow": "rare"}),
    Case(RUNS, {"workflow": "workflow7", "status": "cancelled"}),
    Case(RUNS, {"name": "none"}),
    Case(RUNS, {"tag": "even"}),
    Case(RUNS, {"tag": "customer7"}),
    Case(RUNS, {"tag": "none"}),
    Case(RUNS, {"stuck": "true"}),
    Case(RUNS, {"since": "2020-01-01T00:00:00Z", "until": "2020-01-02T00:00:00Z"}),
    Case("/api/v1/search", {"text": "app.task7"}),
    Case("/api/v1/search", {"text": "rare words"}),
    Case("/api/v1/search", {"text": "none"}),
    Case("/api/v1/queues", {}),
    Case("/api/v1/workflows", {}),
    Case("/api/v1/schedules", {}),
    Case("/api/v1/workers", {}),
    Case("/api/v1/throughput", {"queue": "queue7"}),
    Case("/api/v1/status", {}),
)


def fill(url: str, ended: int, opened: int, runs: int) -> None:
    """Insert the rows in the order of their creation."""
    connection = psycopg2.connect(url)
    connection.autocommit = True
    step, now = 100_000, datetime.now(UTC)
    with connection.cursor() as cursor:
        for statement, count, offset in ((_ENDED, ended, 0), (_OPEN, opened, ended), (_RUNS, runs, 0)):
            run = _ID.replace("{total}", str(runs)).replace("- n)", "- n / 5)").replace("n %%", "n / 5 %%")
            run = run.replace("to_hex(n)", "to_hex(n / 5)")
            sql = statement.format(id=_ID, at=_AT, run=run, runs=runs).replace("{total}", str(offset + count))
            for first in track(range(offset, offset + count, step), "filling"):
                last = min(first + step, offset + count) - 1
                cursor.execute(sql, {"first": first, "last": last, "payload": b"\x92\x01\x02" * 20, "now": now})
        cursor.execute(THROUGHPUT)
        cursor.execute("VACUUM ANALYZE")
    connection.close()


def is_empty(url: str) -> bool:
    """Return whether the database has not been filled yet."""
    connection = psycopg2.connect(url)
    with connection.cursor() as cursor:
        cursor.execute("SELECT NOT EXISTS (SELECT FROM orchestrator.ended_tasks)")
        (found,) = cursor.fetchone() or (True,)
    connection.close()
    return bool(found)


async def pages(client: httpx.AsyncClient, case: Case, max_pages: int) -> tuple[list[float], int]:
    """Read up to `max_pages` pages; return their durations in milliseconds, and the number of rows."""
    durations: list[float] = []
    rows = 0
    cursor: dict[str, str] = {}
    while len(durations) < max_pages:
        began = time.perf_counter()
        response = await client.get(case.path, params={**case.query, **cursor})
        durations.append(1000 * (time.perf_counter() - began))
        found = response.raise_for_status().json()
        rows += len(found.get("items", ()))
        if not found.get("next"):
            break
        cursor = {"cursor": found["next"]}
    return durations, rows


async def measure(environ: Mapping[str, str], max_pages: int) -> list[tuple[Case, list[float], int]]:
    found = []
    app = create_app(load_settings(environ=environ))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=600
    ) as client:
        await client.get("/readyz")
        for case in CASES:
            durations, rows = await pages(client, case, max_pages)
            found.append((case, durations, rows))
            print(
                f"{case}  {len(durations)} pages  {durations[0]:.1f} ms first  {max(durations):.1f} ms worst",
                file=sys.stderr,
            )
    return found


def main() -> None:
    """Fill the database, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ended", type=int, default=5_000_000)
    parser.add_argument("--open", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--pages", type=int, default=1_000)
    parser.add_argument(
        "--folder", type=Path, help="where the servers keep their data, to measure again without filling"
    )
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="lists-") as folder,
        EmbeddedServices(options.folder or Path(folder)) as services,
    ):
        url = services.postgres.create_database("lists")
        environ = {"ORCHESTRATOR_DATABASE_URL": url, "ORCHESTRATOR_REDIS_URL": services.redis_url}
        upgrade(url)
        if is_empty(url):
            fill(url, options.ended, options.open, options.runs)
        rows = asyncio.run(measure(environ, options.pages))
    table = Table("list", "pages", "rows", "first ms", "median ms", "last ms", "worst ms")
    for case, durations, count in rows:
        figures = (durations[0], statistics.median(durations), durations[-1], max(durations))
        table.add_row(str(case), str(len(durations)), str(count), *(f"{figure:.1f}" for figure in figures))
    Console().print(table)


if __name__ == "__main__":
    main()
