"""A producer of Celery: `python -m tests.chaos.bridge.producer`. It notes what it sends before and after."""

from __future__ import annotations

import itertools
import os
import random
import time
from pathlib import Path
from typing import Any

from celery import chain
from kombu.exceptions import OperationalError

from tests.chaos.bridge import journal
from tests.chaos.bridge.theirs import note

KINDS = ("plain", "plain", "plain", "urgent", "minor", "later", "chain")


def main() -> None:
    """Send until this is killed, or told to stop by a file."""
    stop = Path(os.environ["BRIDGE_JOURNAL"]).with_name("stop")
    roll = random.Random()
    for number in itertools.count():
        if stop.exists():
            break
        what, kind = f"{os.getpid()}-{number}", roll.choice(KINDS)
        journal.write(event="trying", what=what, kind=kind)
        try:
            ids = send(what, kind, roll.uniform(0, 0.3))
        except (OperationalError, OSError):
            time.sleep(0.5)  # its Redis is away: whether it has the message, nobody knows
            continue
        journal.write(event="sent", what=what, ids=ids)
        time.sleep(roll.expovariate(20))


def send(what: str, kind: str, seconds: float) -> dict[str, str]:
    """Send one task, or two; return their ids in Celery."""
    if kind == "chain":
        last = chain(note.si(what, seconds), note.si(f"{what}/2", seconds)).apply_async(retry=False)
        return {what: last.parent.id, f"{what}/2": last.id}
    options: dict[str, Any] = {
        "urgent": {"priority": 0},
        "minor": {"priority": 9},
        "later": {"countdown": 2, "expires": 3600},
    }.get(kind, {})
    return {what: note.apply_async((what, seconds), retry=False, **options).id}


if __name__ == "__main__":
    main()
