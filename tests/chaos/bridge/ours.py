"""The same task, here."""

from __future__ import annotations

from orchestrator import Orchestrator
from tests.chaos.bridge import journal

app = Orchestrator()


@app.task(name="shop.note")
def note(what: str, seconds: float) -> str:
    return journal.note("ours", what, seconds)
