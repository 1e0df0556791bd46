"""How long the server works on each page of the dashboard and on each list of the API, with millions of rows behind it.

    python -m tests.benchmarks.pages --ended 5000000 --open 1000000 --runs 1000000

Everything goes through the code of the API without a network, each several times, and nothing that was read for the one
before is used again. A list is looked at where it begins and where its thousandth page does. The statements that took
longest are explained. `docs/performance.md` holds the findings.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psycopg2
from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, event

from orchestrator.api.app import create_app
from orchestrator.api.recent import Recent
from orchestrator.domain import timezones
from orchestrator.domain.access import Secret
from orchestrator.domain.flow.state import FlowState, Frame, Wait
from orchestrator.embedded import EmbeddedServices
from orchestrator.sdk.backend import Backend
from orchestrator.sdk.dag import definitions
from orchestrator.sdk.flow import reading
from orchestrator.settings import load_settings
from orchestrator.store.database import upgrade
from tests.benchmarks.lists import CASES, RUNS, TASKS, THROUGHPUT, Case, fill, is_empty

PAGE_MS, LIST_MS = 100, 50
"""What pages and lists must stay below."""
_TICK = os.sysconf("SC_CLK_TCK")
_KEY = Secret("0123456789ab", "a" * 43)

_MORE = (
    """
INSERT INTO orchestrator.audit (at, who, origin, act, kind, target, detail)
SELECT now() - make_interval(secs => 1000000 - n), CASE WHEN n = 7 THEN 'rare' ELSE 'ada (0123456789ab)' END,
       '10.0.0.' || n % 200, (ARRAY['cancel', 'retry', 'pause', 'resume'])[1 + n % 4],
       CASE WHEN n % 4 < 2 THEN 'task' ELSE 'queue' END, 'queue' || n % 1000, '{}'
  FROM generate_series(1, 1000000) AS n""",
    """
INSERT INTO orchestrator.workers (id, host, pid, queues, names, slots, running, state, started_at, seen_at)
SELECT 'host-' || n % 20 || '-' || n, 'host-' || n % 20, n, ARRAY(SELECT 'queue' || q FROM generate_series(0, 19) AS q),
       ARRAY(SELECT 'app.task' || t FROM generate_series(0, 49) AS t), 16, 12, 'live', now(), now()
  FROM generate_series(1, 100) AS n""",
    """
UPDATE orchestrator.tasks SET status = 'running', attempt = 1, started_at = now(), dispatched_at = now(),
       worker = (SELECT id FROM orchestrator.workers ORDER BY id OFFSET seq % 100 LIMIT 1)
 WHERE id IN (SELECT id FROM orchestrator.tasks ORDER BY seq LIMIT 1200)""",
    """
INSERT INTO orchestrator.attempts (task_id, attempt, outcome, error, worker, started_at, ended_at)
SELECT id, 1, 'failed', error, worker, started_at, ended_at FROM orchestrator.ended_tasks WHERE status = 'failed'""",
    """
INSERT INTO orchestrator.api_keys (id, name, hash, scope)
SELECT lpad(to_hex(n), 12, '0'), 'key' || n, 'x', 'read' FROM generate_series(1, 50) AS n""",
)
_ASKS = {
    "start": "ask",
    "nodes": {
        "ask": {"kind": "approval", "description": "Is it within the budget?"},
        "ship": {"exec_type": "local_func", "func": "app.task7"},
    },
    "edges": [{"from": "ask", "action": "approved", "to": "ship"}],
}
_FLOW_RUNS = """
INSERT INTO orchestrator.runs (id, name, status, total, open, created_at, started_at, workflow, version, flow, params,
       state)
SELECT (lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint - 20000 + n), 12, '0') || '7000a'
       || lpad(to_hex(n), 15, '0'))::uuid, 'flow' || n %% 30, 'running', 0, 0, now(), now(), 'flow' || n %% 30, 1, true,
       '{}', %s
  FROM generate_series(1, 20000) AS n"""
_SOMETHING = {
    "run": "SELECT id FROM orchestrator.runs WHERE workflow = 'workflow7' ORDER BY id DESC LIMIT 1",
    "failed_run": "SELECT id FROM orchestrator.runs WHERE status = 'failed' ORDER BY id DESC LIMIT 1",
    "failed": "SELECT id FROM orchestrator.ended_tasks WHERE status = 'failed' ORDER BY ended_at DESC LIMIT 1",
    "pending": "SELECT id FROM orchestrator.tasks WHERE status = 'pending' ORDER BY id LIMIT 1",
    "flow_run": "SELECT id FROM orchestrator.runs WHERE flow ORDER BY id DESC LIMIT 1",
    "last_task": "SELECT id FROM orchestrator.ended_tasks ORDER BY id OFFSET 200 LIMIT 1",
}
_PAGES = (
    "/ui",
    "/ui/queues",
    "/ui/queues/queue7",
    "/ui/queues/none",
    "/ui/tasks",
    "/ui/tasks?status=failed",
    "/ui/tasks?status=running",
    "/ui/tasks?queue=queue7&name=app.task7",
    "/ui/tasks?name=app.none",
    "/ui/tasks?error=rare+words",
    "/ui/tasks/retry?queue=queue7",
    "/ui/tasks/retry?error=wrong",
    "/ui/tasks/{failed}",
    "/ui/tasks/{pending}",
    "/ui/failures",
    "/ui/failures?within=1h",
    "/ui/failures?within=7d",
    "/ui/runs",
    "/ui/runs?status=failed",
    "/ui/runs?name=none",
    "/ui/runs?tag=customer7",
    "/ui/runs/{run}",
    "/ui/runs/{failed_run}",
    "/ui/workflows",
    "/ui/workflows/workflow7",
    "/ui/schedules",
    "/ui/schedules/workflow7/default/backfills?start=2026-01-01&end=2026-01-08",
    "/ui/flows",
    "/ui/flows/flow7",
    "/ui/runs/{flow_run}",
    "/ui/approvals",
    "/ui/workers",
    "/ui/search?text=app.task7",
    "/ui/search?text=rare+words",
    "/ui/search?text=none",
    "/ui/audit",
    "/ui/audit?who=rare",
    "/ui/audit?act=none",
    "/ui/audit?target=queue7",
    "/ui/keys",
)
_LISTS = (
    *CASES,
    Case(TASKS, {"error": "rare words"}),
    Case(TASKS, {"error": "none"}),
    Case(TASKS, {"since": "2020-01-01T00:00:00Z", "until": "2020-01-02T00:00:00Z"}),
    Case(TASKS, {"run": "{run}"}),
    Case(RUNS, {"parent": "{run}"}),
    Case(RUNS + "/{run}/steps", {}),
    Case("/runs", {}),
    Case("/runs/{run}/tasks", {}),
    Case("/workflows", {}),
    Case("/api/v1/audit", {}),
    Case("/api/v1/audit", {"who": "rare"}),
    Case("/api/v1/audit", {"act": "none"}),
    Case("/api/v1/audit", {"kind": "queue", "target": "queue7"}),
    Case("/api/v1/audit", {"since": "2020-01-01T00:00:00Z", "until": "2020-01-02T00:00:00Z"}),
    Case("/api/v1/workflows/workflow7/versions", {}),
    Case("/api/v1/quarantine", {}),
    Case("/api/v1/flows", {}),
    Case("/flows", {}),
    Case("/tasks", {"flow": "none"}),
)


@dataclass
class Spent:
    """What one page or list has cost."""

    what: str
    bound: int
    took: list[float] = field(default_factory=list)
    """Milliseconds, of each time."""
    api_cpu: float = 0.0
    postgres_cpu: float = 0.0
    statements: dict[str, tuple[float, Any]] = field(default_factory=dict)
    """The longest time that each took, and with what parameters."""

    @property
    def median(self) -> float:
        """Of how long it took."""
        return statistics.median(self.took)


def furnish(url: str, environ: Mapping[str, str]) -> None:
    """Add what there is beside tasks and runs."""
    backend = Backend(load_settings(environ=environ))
    for number in range(30):
        steps = {f"step{place}": {"task": f"app.task{place}"} for place in range(5)}
        for place in range(1, 5):
            steps[f"step{place}"]["depends_on"] = [f"step{place - 1}"]  # type: ignore[assignment]
        schedule = {"cron": f"*/{5 + number} * * * *"}
        backend.workflows.apply(
            definitions.from_data({"name": f"workflow{number}", "schedule": schedule, "tasks": steps})
        )
    for number in range(30):
        backend.flows.publish(f"flow{number}", reading.from_data(_ASKS))
    backend.close()
    connection = psycopg2.connect(url)
    connection.autocommit = True
    with connection.cursor() as cursor:
        wait = Wait("signal", {"amount": 1_100}, key="ask")
        state = FlowState([Frame("ask", {"customer": "ada"}, entered=time.time())], wait, steps=2, recorded=1)
        cursor.execute(_FLOW_RUNS, [timezones.encode(state.to_plain())])
        cursor.execute(
            "INSERT INTO orchestrator.api_keys (id, name, hash, scope) VALUES (%s, 'ada', %s, 'admin')",
            [_KEY.id, _KEY.hash],
        )
        for statement in _MORE:
            cursor.execute(statement)
        cursor.execute("VACUUM ANALYZE")
    connection.close()


def refresh(url: str) -> dict[str, UUID]:
    """Bring the last hour of counts up to now, where the rows are kept; return something of every kind to look at."""
    connection = psycopg2.connect(url)
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE orchestrator.throughput")
        cursor.execute(THROUGHPUT)
        found = {}
        for name, statement in _SOMETHING.items():
            cursor.execute(statement)
            (found[name],) = cursor.fetchone() or (None,)
    connection.close()
    return {name: UUID(str(value)) for name, value in found.items()}


class Watch:
    """Sees the statements of this process, and the CPU time of Postgres."""

    def __init__(self, postgres: int) -> None:
        self._postgres = postgres
        self.statements: list[tuple[str, Any, float]] = []
        self._began = 0.0
        event.listen(Engine, "before_cursor_execute", self._before)
        event.listen(Engine, "after_cursor_execute", self._after)

    def _before(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def _after(self, _: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        self.statements.append((statement, parameters, 1000 * (time.perf_counter() - self._began)))

    def postgres_cpu(self) -> float:
        """Return milliseconds that the server's processes have used."""
        return sum(_cpu(pid) for pid in (self._postgres, *_children(self._postgres)))


def _children(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        yield from (int(word) for word in (thread / "children").read_text().split())


def _cpu(pid: int) -> float:
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return 1000 * (int(words[11]) + int(words[12])) / _TICK


async def ask(client: httpx.AsyncClient, watch: Watch, recents: list[Recent], spent: Spent, times: int) -> Any:
    """Ask for something several times, and note what it cost; return the last answer."""
    answer = await client.get(spent.what)
    watch.statements.clear()
    api, postgres = time.process_time(), watch.postgres_cpu()
    for _ in range(times):
        for recent in recents:
            recent.forget()
        began = time.perf_counter()
        answer = await client.get(spent.what)
        spent.took.append(1000 * (time.perf_counter() - began))
    spent.api_cpu = 1000 * (time.process_time() - api) / times
    spent.postgres_cpu = (watch.postgres_cpu() - postgres) / times
    for statement, parameters, took in watch.statements:
        if took > spent.statements.get(statement, (0.0,))[0]:
            spent.statements[statement] = took, parameters
    if answer.status_code != (404 if spent.what == "/ui/queues/none" else 200):
        raise SystemExit(f"{spent.what} was answered with {answer.status_code}: {answer.text[:500]}")
    mark = "" if spent.median < spent.bound else "  TOO SLOW"
    print(
        f"{spent.median:8.1f} ms  cpu {spent.api_cpu:6.1f} + {spent.postgres_cpu:6.1f}  {spent.what}{mark}", flush=True
    )
    return answer


async def thousandth(client: httpx.AsyncClient, address: str) -> str | None:
    """Return the cursor of the thousandth page of fifty, or of the last one."""
    cursor: Any = None
    for _ in range(50):
        given = {"limit": "1000"} | ({} if cursor is None else {"cursor": str(cursor)})
        answer = await client.get(httpx.URL(address).copy_merge_params(given))
        if answer.status_code != 200 or not answer.json().get("next"):
            break
        cursor = answer.json()["next"]
    return None if cursor is None else str(cursor)


async def measure(
    environ: Mapping[str, str], watch: Watch, there: Mapping[str, UUID], times: int, only: str
) -> list[Spent]:
    """Ask for every page and every list."""
    recents: list[Recent] = []
    begin = Recent.__init__
    Recent.__init__ = lambda self: (begin(self), recents.append(self))[0]  # type: ignore[method-assign]
    app = create_app(load_settings(environ=environ))
    del recents[1::2]  # minutes that are over stay known
    found: list[Spent] = []
    transport, headers = httpx.ASGITransport(app), {"Authorization": f"Bearer {_KEY}"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", timeout=600, headers=headers
    ) as client:
        await client.get("/readyz")
        for path in _PAGES:
            if only in path:
                found.append(Spent(path.format(**there), PAGE_MS))
                await ask(client, watch, recents, found[-1], times)
        for case in _LISTS:
            if only not in case.path:
                continue
            query = {name: str(value).format(**there) for name, value in case.query.items()}
            address = str(httpx.URL(case.path.format(**there), params=query))
            found.append(Spent(address, LIST_MS))
            answer = (await ask(client, watch, recents, found[-1], times)).json()
            if isinstance(answer, dict) and answer.get("next"):
                last = await thousandth(client, address)
                found.append(Spent(str(httpx.URL(address).copy_merge_params({"cursor": last})), LIST_MS))
                await ask(client, watch, recents, found[-1], times)
    return found


def explain(url: str, found: list[Spent], most: int) -> None:
    """Print the plans of the statements that took longest."""
    slowest: dict[str, tuple[float, Any, str]] = {}
    for spent in found:
        for statement, (took, parameters) in spent.statements.items():
            if statement.lstrip()[:6] in ("SELECT", "WITH /") and took > slowest.get(statement, (0.0,))[0]:
                slowest[statement] = took, parameters, spent.what
    connection = psycopg2.connect(url)
    for statement, (took, parameters, what) in sorted(slowest.items(), key=lambda one: -one[1][0])[:most]:
        print(f"\n{took:.1f} ms, for {what}:\n{statement[:200]} …")
        with connection.cursor() as cursor:
            cursor.execute("EXPLAIN (ANALYZE, BUFFERS) " + statement, parameters or None)
            print("\n".join(f"    {line}" for (line,) in cursor.fetchall()))
        connection.rollback()
    connection.close()


def main() -> None:
    """Fill, measure, explain."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ended", type=int, default=5_000_000)
    parser.add_argument("--open", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--times", type=int, default=11)
    parser.add_argument("--plans", type=int, default=10, help="how many statements are explained")
    parser.add_argument("--only", default="", help="addresses with this in them")
    parser.add_argument("--folder", type=Path, help="where the servers keep their data, to measure again")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="pages-") as folder,
        EmbeddedServices(given.folder or Path(folder)) as services,
    ):
        url = services.postgres.create_database("lists")
        environ = {"ORCHESTRATOR_DATABASE_URL": url, "ORCHESTRATOR_REDIS_URL": services.redis_url}
        upgrade(url)
        if is_empty(url):
            fill(url, given.ended, given.open, given.runs)
        connection = psycopg2.connect(url)
        with connection.cursor() as cursor:
            cursor.execute("SELECT NOT EXISTS (SELECT FROM orchestrator.workers)")
            (is_bare,) = cursor.fetchone() or (True,)
        connection.close()
        if is_bare:
            furnish(url, environ)
        there = refresh(url)
        watch = Watch(services.postgres.pid)
        found = asyncio.run(measure(environ, watch, there, given.times, given.only))
        explain(url, found, given.plans)
    table = Table("address", "median ms", "worst ms", "CPU of the API, ms", "CPU of Postgres, ms", "")
    for spent in found:
        figures = (spent.median, max(spent.took), spent.api_cpu, spent.postgres_cpu)
        mark = "" if spent.median < spent.bound else f"above {spent.bound}"
        table.add_row(spent.what, *(f"{figure:.1f}" for figure in figures), mark)
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
