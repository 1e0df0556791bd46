"""Logs, connections, and what outlives the processes."""

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
"""Tasks fail here on purpose, and their tracebacks are no defects."""
_MOST_CONNECTIONS = {"scheduler": 8, "worker": 26, "api": 24}
"""Through one wire, of a member at rest. A worker's parent has 2; each of its two processes receives on one, reports on
two, passes words on by one, and reads pages of histories on as many as turns run at once, which are kept: up to 5;
work that others pull takes one to hear of it, and up to 2 to ask."""


def check_logs(arena: Arena) -> Iterator[str]:
    for member in arena.members:
        records = _RECORD.split(member.log.read_text(errors="replace"))
        text = "".join(record for record in records if not _FAILED_TASK.search(record.partition("\n")[0]))
        for words in _DEFECTS:
            if number := text.count(words):
                yield f"{words!r}: {number} times in {member.log}"


def check_connections(arena: Arena) -> Iterator[str]:
    for member in arena.members:
        most = _MOST_CONNECTIONS[member.name.partition("-")[0]]
        for server, wire in (("Redis", member.redis), ("Postgres", member.postgres)):
            if wire is not None and wire.connections > most:
                yield f"{member} holds {wire.connections} connections to {server}; at most {most} expected"


def check_after_stop(arena: Arena, exit_codes: dict[str, int | None]) -> list[str]:
    """Return what outlived the processes."""
    return [
        *(f"{name} had to be killed" for name, code in exit_codes.items() if code is None),
        *(f"{name} ended with exit code {code}" for name, code in exit_codes.items() if code),
        *_soon(lambda: [f"a process was left behind: {process}" for process in _left_behind(arena)]),
        *_soon(lambda: [f"a connection was left behind: {name}" for name in _connections_left(arena)]),
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
        others = [client for client in redis.client_list() if client["id"] != str(redis.client_id())]
    return found + [f"to Redis: {client['cmd']} from {client['addr']}" for client in others]


def _soon(look: Callable[[], list[str]], timeout: float = 5.0) -> list[str]:
    """Return what is found to be wrong; what goes away by itself in a moment is not."""
    deadline = time.monotonic() + timeout
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
