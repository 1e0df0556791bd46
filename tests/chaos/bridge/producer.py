"""A Celery producer: `python -m tests.chaos.bridge.producer`. Records each send before and after."""

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
_OUTAGE_ERRORS = (OperationalError, BackendError, RedisError, OSError)


def main() -> None:
    """Send and read results until killed, or until the file `stop` exists."""
    stop = Path(os.environ["BRIDGE_JOURNAL"]).with_name("stop")
    generator = random.Random()
    unread: deque[tuple[str, AsyncResult]] = deque()
    for number in itertools.count():
        if stop.exists():
            break
        what, kind = f"{os.getpid()}-{number}", generator.choice(KINDS)
        journal.write(event="trying", what=what, kind=kind)
        try:
            ids = send(what, kind, generator.uniform(0, 0.3))
        except _OUTAGE_ERRORS:
            time.sleep(0.5)  # the broker may or may not have the message
            continue
        journal.write(event="sent", what=what, kind=kind, ids=ids)
        unread.append((what, app.AsyncResult(ids[what])))
        read(unread)
        time.sleep(generator.expovariate(20))


def read(unread: deque[tuple[str, AsyncResult]]) -> None:
    """Read the next results, if available."""
    for what, result in [unread.popleft() for _ in range(min(2, len(unread)))]:
        try:
            if result.ready():
                journal.write(event="read", what=what, value=str(result.get(timeout=5, propagate=False)))
                continue
        except _OUTAGE_ERRORS:
            pass
        unread.append((what, result))


def send(what: str, kind: str, seconds: float) -> dict[str, str]:
    """Send one or several tasks; return their Celery ids by name."""
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
