"""A producer of Celery: `python -m tests.chaos.bridge.producer`. It notes what it sends before and after."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import deque
from pathlib import Path
from typing import Any

from celery import chain, chord
from celery.exceptions import BackendError
from celery.result import AsyncResult
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from tests.chaos.bridge import journal
from tests.chaos.bridge.theirs import app, fail_once, note

KINDS = ("plain", "plain", "plain", "urgent", "minor", "later", "chain", "chord", "retry")
_AWAY = (OperationalError, BackendError, RedisError, OSError)


def main() -> None:
    """Send until this is killed, or told to stop by a file; read results meanwhile."""
    stop = Path(os.environ["BRIDGE_JOURNAL"]).with_name("stop")
    roll = random.Random()
    unread: deque[tuple[str, AsyncResult]] = deque()
    for number in itertools.count():
        if stop.exists():
            break
        what, kind = f"{os.getpid()}-{number}", roll.choice(KINDS)
        journal.write(event="trying", what=what, kind=kind)
        try:
            ids = send(what, kind, roll.uniform(0, 0.3))
        except _AWAY:
            time.sleep(0.5)  # its Redis is away: whether it has the message, nobody knows
            continue
        journal.write(event="sent", what=what, kind=kind, ids=ids)
        unread.append((what, app.AsyncResult(ids[what])))
        read(unread)
        time.sleep(roll.expovariate(20))


def read(unread: deque[tuple[str, AsyncResult]]) -> None:
    """Read the next results, if they are there."""
    for what, result in [unread.popleft() for _ in range(min(2, len(unread)))]:
        try:
            if result.ready():
                journal.write(event="read", what=what, value=str(result.get(timeout=5, propagate=False)))
                continue
        except _AWAY:
            pass
        unread.append((what, result))


def send(what: str, kind: str, seconds: float) -> dict[str, str]:
    """Send one task, or some; return their ids in Celery."""
    if kind == "chain":
        last = chain(note.si(what, seconds), note.si(f"{what}/2", seconds)).apply_async(retry=False)
        return {what: last.parent.id, f"{what}/2": last.id}
    if kind == "chord":
        parts = [f"{what}/a", f"{what}/b"]
        body = chord([note.si(part, seconds) for part in parts], note.si(what, seconds)).apply_async(retry=False)
        return {what: body.id, **{part: one.id for part, one in zip(parts, body.parent.results, strict=True)}}
    if kind == "retry":
        id = fail_once.apply_async((what, seconds), retry=False).id
        return {what: id, f"{what}#1": id}
    options: dict[str, Any] = {
        "urgent": {"priority": 0},
        "minor": {"priority": 9},
        "later": {"countdown": 2, "expires": 3600},
    }.get(kind, {})
    return {what: note.apply_async((what, seconds), retry=False, **options).id}


if __name__ == "__main__":
    main()
