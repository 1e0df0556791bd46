"""The journal of tasks. Imports neither Celery nor the orchestrator."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


def write(**entry: Any) -> None:
    line = json.dumps({"pid": os.getpid(), "at": time.time(), **entry}) + "\n"
    file = os.open(os.environ["BRIDGE_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def note(who: str, what: str, seconds: float) -> str:
    """Perform a task: record its start, sleep, and record its end."""
    write(who=who, what=what, event="start")
    time.sleep(seconds)
    write(who=who, what=what, event="end")
    return what


def fails(who: str, what: str) -> bool:
    """Return whether a task that fails once fails now; record the failing run under its own name."""
    marker = Path(os.environ["BRIDGE_JOURNAL"]).with_name(f"failed-{what}")
    if marker.exists():
        return False
    write(who=who, what=f"{what}#1", event="start")
    marker.touch()
    write(who=who, what=f"{what}#1", event="end")
    return True
