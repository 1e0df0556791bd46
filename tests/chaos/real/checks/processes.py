"""Checks logs, connections, and leftovers of processes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator

import psutil

from tests.chaos.real.arena import Arena

_DEFECTS = (": a defect", "Traceback (most recent call last)", "event.quarantined")
_RECORD = re.compile(r"^(?=\d{4}-\d\d-\d\d )", re.MULTILINE)
_FAILED_TASK = re.compile(r"\[[\da-f-]{36}\] (task|run)\.failed")
"""Log records of tasks that fail on purpose; their tracebacks are not defects."""
_MAX_CONNECTIONS = {"scheduler": 8, "worker": 26, "api": 24}
"""Connections through one proxy of a member at rest, at most. A worker's parent has 2. Each of its two processes has 1
to receive, 2 to report, 1 for messages, and up to 5 to read histories (one per concurrent turn, kept open). Pulled work
takes 1 to be notified and up to 2 for requests."""


def check_logs(arena: Arena) -> Iterator[str]:
    for member in arena.members:
        records = _RECORD.split(member.log.read_text(errors="replace"))
        text = "".join(record for record in records if not _FAILED_TASK.search(record.partition("\n")[0]))
        for pattern in _DEFECTS:
            if number := text.count(pattern):
                yield f"{pattern!r}: {number} times in {member.log}"


def check_connections(arena: Arena) -> Iterator[str]:
    for member in arena.members:
        allowed = _MAX_CONNECTIONS[member.name.partition("-")[0]]
        for server, wire in (("Redis", member.redis), ("Postgres", member.postgres)):
            if wire is not None and wire.connections > allowed:
                yield f"{member} holds {wire.connections} connections to {server}; at most {allowed} expected"


def check_after_stop(arena: Arena, exit_codes: dict[str, int | None]) -> list[str]:
    """Return what the processes left behind, and abnormal exit codes."""
    return [
        *(f"{name} had to be killed" for name, code in exit_codes.items() if code is None),
        *(f"{name} ended with exit code {code}" for name, code in exit_codes.items() if code),
        *_persistent(lambda: [f"a process was left behind: {process}" for process in _left_behind(arena)]),
        *_persistent(lambda: [f"a connection was left behind: {name}" for name in _connections_left(arena)]),
    ]


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
        other_clients = [client for client in redis.client_list() if client["id"] != str(redis.client_id())]
    return found + [f"to Redis: {client['cmd']} from {client['addr']}" for client in other_clients]


def _persistent(check: Callable[[], list[str]], timeout: float = 5.0) -> list[str]:
    """Return the violations that a check still finds after a timeout."""
    deadline = time.monotonic() + timeout
    while (found := check()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
