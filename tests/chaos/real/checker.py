"""What must be true when everything is healed and at rest.

Judged from the database, Redis, the process table and the journal alone: nothing of the product is asked, and what it
says of itself is believed nowhere but in its own logs, where a traceback is a defect.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import msgspec
import psutil
import psycopg2

from tests.chaos.real.arena import Arena
from tests.chaos.real.journal import Execution
from tests.chaos.real.project import RETRIES

PREFIX = "{orchestrator:0}"
_ENDED = ("success", "failed", "cancelled", "skipped")
_DEFECTS = ("this should not have happened", "Traceback (most recent call last)", "set aside:")
_MOST_CONNECTIONS = {"scheduler": 8, "worker": 12}
"""Through one wire, of a member at rest: those of all its processes, with a few to spare."""


def wait_for_rest(arena: Arena, timeout: float) -> list[str]:
    """Wait until nothing is open and nothing stands in the streams; return what still does after the time."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            left = [*_check_rest(arena), *_check_streams(arena)]
        except psycopg2.OperationalError as error:
            left = [f"Postgres cannot be asked: {error}"]  # it starts
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def check(arena: Arena) -> list[str]:
    """Return everything that is wrong with an arena at rest."""
    ended = {str(row["id"]): row for row in arena.sql("SELECT * FROM orchestrator.ended_tasks")}
    executions = arena.journal.executions()
    return [
        *_check_ends(arena, ended),
        *_check_executions(ended, executions),
        *_check_overlaps(arena, executions),
        *_check_limits(arena, executions),
        *_check_runs(arena),
        *_check_logs(arena),
        *_check_connections(arena),
    ]


def check_after_stop(arena: Arena, exit_codes: dict[str, int | None]) -> list[str]:
    """Return what outlived the processes."""
    return [
        *(f"{name} had to be killed" for name, code in exit_codes.items() if code is None),
        *(f"{name} ended with exit code {code}" for name, code in exit_codes.items() if code),
        *_soon(lambda: [f"a process was left behind: {process}" for process in _left_behind(arena)]),
        *_soon(lambda: [f"a connection was left behind: {name}" for name in _connections_left(arena)]),
    ]


# -- at rest


def _check_rest(arena: Arena) -> Iterator[str]:
    for row in arena.sql("SELECT id, name, status, attempt, hold, worker FROM orchestrator.tasks LIMIT 20"):
        yield f"a task has not ended: {_shown(row)}"
    for row in arena.sql("SELECT id, name, status, total, open FROM orchestrator.runs WHERE ended_at IS NULL LIMIT 20"):
        yield f"a run has not ended: {_shown(row)}"
    for row in arena.sql("SELECT * FROM orchestrator.inbox LIMIT 20"):
        yield f"left in the inbox: {_shown(row)}"


def _check_streams(arena: Arena) -> Iterator[str]:
    with arena.redis() as redis:
        generation = (redis.get(f"{PREFIX}:generation") or b"").decode()
        for key in sorted(key.decode() for key in redis.scan_iter(match="[{]orchestrator:0[}]:*", count=1000)):
            kind = key.removeprefix(f"{PREFIX}:").partition(":")[0]
            if kind in ("events", "queue", "quarantine") and (length := redis.xlen(key)):
                yield f"{length} entries are left in {key}"
            if kind in ("events", "queue") and f":{kind}:{generation}" not in key:
                yield f"a stream of an older generation than {generation} is left: {key}"
            if kind == "queue":
                for group in redis.xinfo_groups(key):
                    if group["pending"]:
                        yield f"{group['pending']} entries of {key} are pending"


def _check_ends(arena: Arena, ended: dict[str, Any]) -> Iterator[str]:
    """Every enqueue that committed has come to one end."""
    for task in arena.journal.committed_tasks() - ended.keys():
        yield f"task {task} was enqueued and has no end"
    runs = {str(row["id"]) for row in arena.sql("SELECT id FROM orchestrator.runs")}
    for run in arena.journal.committed_runs() - runs:
        yield f"run {run} was started and is gone"
    for row in arena.sql("SELECT id FROM orchestrator.ended_tasks JOIN orchestrator.tasks USING (id)"):
        yield f"task {row['id']} has ended and is open"


def _check_executions(ended: dict[str, Any], executions: list[Execution]) -> Iterator[str]:
    """Every success really ran, its result is that execution's, and every failure has its reason."""
    by_attempt = {(execution.task, execution.attempt): execution for execution in executions}
    for (task, attempt), number in Counter((one.task, one.attempt) for one in executions).items():
        if number > 1:
            yield f"attempt {attempt} of task {task} ran {number} times"
    failures = Counter(execution.task for execution in executions if execution.outcome == "failed")
    began = {execution.task for execution in executions}
    for task, row in ended.items():
        if row["status"] == "success":
            execution = by_attempt.get((task, row["attempt"]))
            if execution is None or execution.outcome != "success":
                yield f"task {task} succeeded in attempt {row['attempt']}, and the log says {execution}"
            elif _token(row["result"]) != f"{task}/{execution.attempt}/{execution.pid}":
                yield f"task {task} has the result {_token(row['result'])}, not that of {execution}"
        elif row["status"] == "failed":
            unlucky = row["failures"] > RETRIES and failures[task] >= row["failures"]
            kind = (row["error"] or {}).get("kind")
            expired = kind == "TaskExpired" and task not in began
            if not (unlucky or expired or kind == "WorkerLost"):
                yield f"task {task} failed without a reason: {_shown(row)}"
        if row["failures"] > failures[task]:
            yield f"task {task} is charged {row['failures']} failures, and the log has {failures[task]}"


def overlaps(arena: Arena, executions: list[Execution]) -> Iterator[tuple[Execution, Execution, bool]]:
    """Yield two attempts of one task that ran beside each other, and whether they may have.

    They may if the worker of the first could not be heard for so long that the leader had to take it for dead.
    """
    journal = arena.journal
    noticed = arena.settings.worker_ttl - arena.settings.heartbeat
    by_task = defaultdict(list)
    for execution in executions:
        by_task[execution.task].append(execution)
    for found in by_task.values():
        for first, second in combinations(sorted(found, key=lambda one: one.began), 2):
            if second.began < journal.end_of(first):
                yield first, second, journal.was_unheard(first.worker, first.began, second.began, noticed)


def _check_overlaps(arena: Arena, executions: list[Execution]) -> Iterator[str]:
    """No attempt ran beside another of its task while its worker was alive and could be heard."""
    for first, second, excused in overlaps(arena, executions):
        if not excused:
            yield (
                f"task {first.task}: attempt {second.attempt} began {second.began - first.began:.2f} s after attempt "
                f"{first.attempt}, which went on for {arena.journal.end_of(first) - second.began:.2f} s more, and "
                f"whose worker was alive and could be heard: {first}, {second}"
            )


def _check_limits(arena: Arena, executions: list[Execution]) -> Iterator[str]:
    """Never more ran at once than may; whom the leader could not hear does not count, as in `overlaps`."""
    journal = arena.journal
    noticed = arena.settings.worker_ttl - arena.settings.heartbeat
    limits = journal.limits()
    changes = defaultdict(list)
    for one in executions:
        ended = journal.end_of(one)
        if one.task in limits and not journal.was_unheard(one.worker, one.began, ended, noticed):
            changes[limits[one.task]] += [(one.began, 1, one), (ended, -1, one)]
    for (name, limit), found in changes.items():
        running = 0
        for _, change, one in sorted(found, key=lambda change: change[:2]):  # ends before beginnings
            running += change
            if running > limit:
                yield f"{running} of {name} ran at once, and {limit} may: {one}"


def _check_runs(arena: Arena) -> Iterator[str]:
    """Counters equal a recount. What a cancelled or failed DAG never created is counted without there being a task."""
    recounts: dict[Any, Counter[str]] = defaultdict(Counter)
    statement = "SELECT run_id, status, count(*) FROM orchestrator.ended_tasks WHERE run_id IS NOT NULL GROUP BY 1, 2"
    for row in arena.sql(statement):
        recounts[row["run_id"]][row["status"]] = row["count"]
    for run in arena.sql("SELECT * FROM orchestrator.runs"):
        counted = Counter({status: run[status] for status in _ENDED})
        recount = recounts[run["id"]]
        uncreated = counted - recount if run["workflow"] is not None else Counter()
        exact = counted == recount + uncreated and not uncreated["success"] and not uncreated["failed"]
        if not exact or run["open"] or run["total"] != counted.total():
            yield f"run {run['id']} counts {dict(counted)} of {run['total']}, and a recount gives {dict(recount)}"
        expected = "cancelled" if run["cancelling"] else "failed" if run["failed"] else "success"
        if run["status"] != expected and not (run["cancelling"] and run["status"] in _ENDED):
            yield f"run {run['id']} ended as {run['status']}, and its tasks say {expected}"


def _check_logs(arena: Arena) -> Iterator[str]:
    for member in arena.members:
        text = member.log.read_text(errors="replace")
        for words in _DEFECTS:
            if number := text.count(words):
                yield f"{words!r}: {number} times in {member.log}"


def _check_connections(arena: Arena) -> Iterator[str]:
    for member in arena.members:
        most = _MOST_CONNECTIONS[member.name.partition("-")[0]]
        for server, wire in (("Redis", member.redis), ("Postgres", member.postgres)):
            if wire is not None and wire.connections > most:
                yield f"{member} holds {wire.connections} connections to {server}; at most {most} expected"


# -- after the end


def _left_behind(arena: Arena) -> list[str]:
    groups = {pid for member in arena.members for pid in member.pids}
    found: list[str] = []
    for process in psutil.process_iter(["cmdline", "status"]):
        try:
            if os.getpgid(process.pid) in groups:
                found.append(f"{process.pid} {process.info['status']} {' '.join(process.info['cmdline'] or ())}")
        except ProcessLookupError:
            continue
    return found


def _connections_left(arena: Arena) -> list[str]:
    statement = (
        "SELECT application_name, state FROM pg_stat_activity "
        "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )
    found = [f"to Postgres: {row['application_name']} ({row['state']})" for row in arena.sql(statement)]
    with arena.redis() as redis:
        others = [client for client in redis.client_list() if client["id"] != str(redis.client_id())]
    return found + [f"to Redis: {client['cmd']} from {client['addr']}" for client in others]


def _soon(look: Callable[[], list[str]], timeout: float = 5.0) -> list[str]:
    """Return what is found to be wrong; what goes away by itself in a moment is not."""
    deadline = time.monotonic() + timeout
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _token(result: Any) -> Any:
    value = msgspec.msgpack.decode(bytes(result)) if result is not None else None
    return value["token"] if isinstance(value, dict) else value


def _shown(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.items() if value is not None and name != "payload")
