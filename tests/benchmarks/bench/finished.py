"""Throughput beside millions of finished tasks, relative to an empty database."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import psutil
import psycopg2

from orchestrator.store import database
from tests.benchmarks.bench.programs import Program, running
from tests.benchmarks.bench.quiet import wait_for_quiet
from tests.benchmarks.bench.remote import RemoteClient
from tests.benchmarks.bench.rounds import Sizes, throughput
from tests.benchmarks.bench.services import Services
from tests.benchmarks.peers.contestants import OURS

MEASURED = ("backlog_rate", "running_rate", "cpu")
"""The CPU time says the same as the rates, and others on the machine disturb it far less."""

# Six days of work, one task in fifty failed; ids in the order of time, as ours are.
_FILL = """
INSERT INTO orchestrator.ended_tasks (id, seq, name, queue, priority, status, attempt, failures, losses, payload,
                                      result, error, worker, created_at, started_at, ended_at)
SELECT (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '7' || substr(md5(n::text), 1, 3)
        || '8' || substr(md5(n::text), 4, 15))::uuid,
       n, 'shop.tasks.resize', 'default', 0, CASE WHEN n %% 50 = 0 THEN 'failed' ELSE 'success' END, 1, 0, 0,
       '\\x93a5612e706e67cd028080', CASE WHEN n %% 50 <> 0 THEN '\\x01'::bytea END,
       CASE WHEN n %% 50 = 0 THEN '{"kind": "ValueError", "message": "no", "traceback": "…"}'::jsonb END,
       'host-1-0123456789abcdef', at, at, at
  FROM generate_series(1, %(count)s) AS n
 CROSS JOIN LATERAL (SELECT now() - interval '6 days' + n * (interval '6 days' / %(count)s)) AS task(at)
"""


def beside_finished(
    services: Services, finished: int, sizes: Sizes, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Let an empty database, a full one, and a full one of which most is being pruned take turns."""
    say(f"{finished:,} finished tasks")
    full = _filled(services, finished)
    cases: Mapping[str, tuple[str | None, dict[str, str]]] = {
        "empty": (None, {}),
        "full": (full, {}),
        "being pruned": (full, {"ORCHESTRATOR_RETENTION_SUCCESS": "86400"}),
    }
    found: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for number in range(rounds):
        for case in sorted(cases, reverse=number % 2 == 1):  # so that none always has the same predecessor
            say(f"round {number + 1}: {case}")
            found[case].append(_turn(services, *cases[case], sizes))
    return {
        "rounds": found,
        "results": {
            case: {rate: median(one[rate] for one in turns) for rate in MEASURED} for case, turns in found.items()
        },
        "ratios": {case: _ratios(turns, found["empty"]) for case, turns in found.items() if case != "empty"},
    }


def _turn(services: Services, template: str | None, settings: dict[str, str], sizes: Sizes) -> dict[str, float]:
    folder, environ = services.fresh(template)
    os.sync()  # what was copied is not to be written while others wait for their commits
    busy = wait_for_quiet(sizes.patience)
    with running(folder, environ | settings) as programs:
        client = RemoteClient(programs, OURS)
        client.ask("prepare")
        scheduler = programs.start("scheduler", [OURS.python, *OURS.scheduler])
        client.ask("wait_until_ready")
        before = _cpu_seconds(services, scheduler)
        rates, _ = throughput(OURS, programs, client, sizes.tasks, lambda _: None)
        cpu = (_cpu_seconds(services, scheduler) - before) / (2 * sizes.tasks)
    services.drop(environ)
    return {**rates, "cpu": cpu * 1e6, "busy": busy}


def _cpu_seconds(services: Services, scheduler: Program) -> float:
    """Return the CPU time that Postgres, with all its processes that are or were, and the scheduler have used."""
    server = psutil.Process(services.embedded.postgres.pid)
    processes = (server, *server.children(), psutil.Process(scheduler.process.pid))
    ended = server.cpu_times()
    return sum(sum(process.cpu_times()[:2]) for process in processes) + ended.children_user + ended.children_system


def _ratios(turns: list[dict[str, float]], empty: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians of the ratios round by round: what disturbs a whole round disturbs both."""
    return {rate: median(ours[rate] / base[rate] for ours, base in zip(turns, empty, strict=True)) for rate in MEASURED}


def _filled(services: Services, count: int) -> str:
    """Return the name of a database with so many finished tasks, from which others can be copied."""
    name = "finished"
    url = services.embedded.postgres.create_database(name)
    database.upgrade(url)
    connection = psycopg2.connect(url)
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute(_FILL, {"count": count})
        cursor.execute("VACUUM ANALYZE orchestrator.ended_tasks")
        cursor.execute("CHECKPOINT")
    connection.close()
    return name
