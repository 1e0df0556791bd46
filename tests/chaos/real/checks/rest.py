"""Checks that nothing is open, in the inbox or in the streams."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import cast

import psycopg2
from redis import ResponseError

from tests.chaos.real.arena import Arena
from tests.chaos.real.checks.rows import shown
from tests.chaos.real.journal import append

PREFIX = "{orchestrator:0}"


def wait_for_rest(arena: Arena, timeout: float) -> list[str]:
    """Wait until nothing is open and the streams are empty; return what remains after the timeout."""
    began = time.monotonic()
    deadline = began + timeout
    while True:
        try:
            remaining = [*_check_rest(arena), *_check_streams(arena)]
        except psycopg2.OperationalError as error:
            remaining = [f"Postgres cannot be asked: {error}"]  # Postgres is starting
        if not remaining or time.monotonic() > deadline:
            return remaining
        append(arena.folder / "left", f"{time.monotonic() - began:7.2f}", remaining[-1])  # explains slow rests
        time.sleep(0.1)


def _check_rest(arena: Arena) -> Iterator[str]:
    for row in arena.sql("SELECT id, name, status, attempt, hold, worker FROM orchestrator.tasks LIMIT 20"):
        yield f"a task has not ended: {shown(row)}"
    for row in arena.sql("SELECT id, name, status, total, open FROM orchestrator.runs WHERE ended_at IS NULL LIMIT 20"):
        yield f"a run has not ended: {shown(row)}"
    for row in arena.sql("SELECT * FROM orchestrator.inbox LIMIT 20"):
        yield f"left in the inbox: {shown(row)}"


def _check_streams(arena: Arena) -> Iterator[str]:
    with arena.redis() as redis:
        generation = cast("bytes", redis.get(f"{PREFIX}:generation") or b"").decode()
        for key in sorted(key.decode() for key in redis.scan_iter(match="[{]orchestrator:0[}]:*", count=1000)):
            kind = key.removeprefix(f"{PREFIX}:").partition(":")[0]
            if kind in ("events", "queue", "quarantine") and (length := redis.xlen(key)):
                yield f"{length} entries are left in {key}"
            if kind in ("events", "queue") and f":{kind}:{generation}" not in key:
                yield f"a stream of an older generation than {generation} is left: {key}"
            if kind == "queue":
                with suppress(ResponseError):  # the stream was just deleted
                    for group in redis.xinfo_groups(key):
                        if group["pending"]:
                            yield f"{group['pending']} entries of {key} are pending"
