"""Samples every line. While Postgres or Redis is down, their lines have no values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg2
from redis import Redis
from redis.exceptions import RedisError

from orchestrator.transport.keys import GROUP, Keys
from tests.chaos.soak import project
from tests.chaos.soak.ledger import Ledger
from tests.chaos.soak.lines import LATENCY_WINDOW, LINES, Samples
from tests.chaos.soak.machines import Machine, Machines

_MEGABYTE = 1_000_000
_CHECK_AGE = 30.0
"""Age in seconds at which a task is first checked."""

_CONNECTIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'orchestrator%'"
_OPEN = "SELECT count(*), count(*) FILTER (WHERE status <> 'pending') FROM orchestrator.tasks"
_SIZES = """
SELECT sum(size) FILTER (WHERE relname = 'tasks'), sum(size) FILTER (WHERE relname <> 'tasks' AND NOT history),
       sum(size) FILTER (WHERE history), sum(n_dead_tup) FILTER (WHERE NOT history)
  FROM (SELECT relname, n_dead_tup, pg_total_relation_size(relid) AS size,
               relname IN ('ended_tasks', 'attempts', 'runs') AS history
          FROM pg_stat_user_tables WHERE schemaname = 'orchestrator') AS tables
"""
_AGE = "SELECT extract(epoch FROM now() - min(ended_at)) FROM orchestrator.ended_tasks"
_LATENCY = f"""
SELECT percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY extract(epoch FROM ended_at - created_at))
  FROM orchestrator.ended_tasks
 WHERE ended_at > now() - interval '{LATENCY_WINDOW:g} seconds' AND name = %s
"""


class Sampler:
    """Samples from outside: /proc, and separate connections to Postgres and Redis."""

    def __init__(self, database_url: str, redis_url: str, machines: Machines, ledgers: Sequence[Ledger]) -> None:
        self._database_url = database_url
        self._connection: psycopg2.extensions.connection | None = None
        self._redis = Redis.from_url(redis_url)
        self._keys = Keys()
        self._machines = machines
        self._ledgers = ledgers
        self._latency_at = LATENCY_WINDOW
        self.times: list[float] = []
        """Seconds since the start of the soak test."""
        self.samples: Samples = {line.key: [] for line in LINES}

    def sample(self, at: float) -> None:
        """Add a value to every line."""
        values: dict[str, float] = {}
        self._sample_processes(values)
        with suppress(RedisError):
            self._sample_redis(values)
        try:
            self._sample_postgres(values, at)
        except psycopg2.Error:
            self.close()
        self.times.append(at)
        for key, line in self.samples.items():
            line.append(float(values[key]) if key in values else None)

    def latest(self, key: str) -> float | None:
        return next((value for value in reversed(self.samples[key]) if value is not None), None)

    def close(self) -> None:
        """Close the connection to Postgres; the next sample opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _sample_processes(self, values: dict[str, float]) -> None:
        for kind, (veteran, *others) in (("scheduler", self._machines.schedulers), ("worker", self._machines.workers)):
            values[f"{kind}_veteran"] = _memory(veteran)
            values[f"files_{kind}"] = _files(veteran)
            alive = [memory for machine in others if (memory := _memory(machine)) > 0]
            if alive:
                values[f"{kind}_others"] = sum(alive) / len(alive)

        used = psutil.cpu_times_percent()  # since the last sample
        values["idle"], values["stolen"] = used.idle, getattr(used, "steal", 0.0)  # Linux only

    def _sample_redis(self, values: dict[str, float]) -> None:
        redis, keys = self._redis, self._keys
        names = [name.decode() for name in redis.scan_iter(count=1000)]
        streams = {
            "events": [name for name in names if name.startswith(keys.events(""))],
            "queues": [name for name in names if name.startswith(keys.queue("", "").rstrip(":"))],
            "orders": [name for name in names if name.startswith(keys.orders(""))],
            "quarantine": [keys.quarantine],
        }
        for kind, found in streams.items():
            values[kind] = sum(int(redis.xlen(name)) for name in found)
        values["consumers"] = sum(_consumers(redis, name) for name in streams["queues"])
        values["redis_keys"] = len(names)
        values["known_workers"] = int(redis.scard(keys.workers))
        info = redis.info()
        values["redis_memory"] = info["used_memory"] / _MEGABYTE
        values["redis_connections"] = info["connected_clients"]

    def _sample_postgres(self, values: dict[str, float], at: float) -> None:
        if self._connection is None:
            self._connection = psycopg2.connect(self._database_url, application_name="soak")
            self._connection.autocommit = True
        with self._connection.cursor() as cursor:
            values["postgres_connections"] = _row(cursor, _CONNECTIONS)[0]
            values["open_tasks"], values["in_flight"] = _row(cursor, _OPEN)
            tasks, small, history, dead = _row(cursor, _SIZES)
            values["tasks_size"], values["small_size"] = tasks / _MEGABYTE, small / _MEGABYTE
            values["history_size"], values["dead_tuples"] = history / _MEGABYTE, dead
            values["history_age"] = _row(cursor, _AGE)[0] or 0.0
            if at >= self._latency_at:
                self._latency_at = at + LATENCY_WINDOW
                (percentiles,) = _row(cursor, _LATENCY, [project.plain.name])
                if percentiles:
                    values["p50"], values["p99"] = (1000 * float(value) for value in percentiles)
                for ledger in self._ledgers:
                    ledger.check(cursor, age=_CHECK_AGE)

    def unfinished(self) -> Counter[str]:
        """Return how many enqueued tasks and runs did not succeed, by state."""
        with psycopg2.connect(self._database_url) as connection, connection.cursor() as cursor:
            found = sum((ledger.unfinished(cursor) for ledger in self._ledgers), Counter[str]())
        connection.close()
        return found

    def is_idle(self) -> bool:
        """Return whether no task and no run is open."""
        with psycopg2.connect(self._database_url) as connection, connection.cursor() as cursor:
            open_tasks = _row(cursor, "SELECT count(*) FROM orchestrator.tasks")[0]
            open_runs = _row(cursor, "SELECT count(*) FROM orchestrator.runs WHERE ended_at IS NULL")[0]
        connection.close()
        return not open_tasks and not open_runs


def _row(cursor: psycopg2.extensions.cursor, statement: str, parameters: list[object] | None = None) -> tuple[Any, ...]:
    cursor.execute(statement, parameters)
    row = cursor.fetchone()
    assert row is not None
    return row


def _consumers(redis: Redis, stream: str) -> int:
    with suppress(RedisError):
        return next((group["consumers"] for group in redis.xinfo_groups(stream) if group["name"] == GROUP.encode()), 0)
    return 0


def _memory(machine: Machine) -> float:
    """Return the memory of a machine's processes in MB; shared pages are divided among their processes."""
    return sum(_proportional_memory(process) for process in machine.processes()) / _MEGABYTE


def _proportional_memory(process: psutil.Process) -> int:
    try:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
        return int(rollup.partition("\nPss:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        with suppress(psutil.Error):
            return int(process.memory_info().rss)
        return 0


def _files(machine: Machine) -> float:
    total = 0
    for process in machine.processes():
        with suppress(psutil.Error):
            total += process.num_fds()
    return total
