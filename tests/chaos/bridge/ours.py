"""The orchestrator's tasks, equal to those of `theirs.py`."""

from __future__ import annotations

from orchestrator import Orchestrator, Retry
from tests.chaos.bridge import journal

app = Orchestrator()


@app.task(name="shop.note")
def note(what: str, seconds: float) -> str:
    return journal.note("ours", what, seconds)


@app.task(name="shop.fail_once", retries=Retry(max=20, base=0.5))
def fail_once(what: str, seconds: float) -> str:
    if journal.fails("ours", what):
        raise RuntimeError("the first run fails")
    return journal.note("ours", what, seconds)
