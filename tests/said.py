"""Log lines of tasks, stored as the leader stores them."""

from __future__ import annotations

from sqlalchemy import Engine

from orchestrator.store import logs
from orchestrator.store.logs import NewChunk
from orchestrator.transport.codec import LogLine, encode


def say(
    engine: Engine, task: bytes, *lines: LogLine, part: int = 0, run: bytes | None = None, step: str = "step"
) -> None:
    attempt = lines[0].attempt
    with engine.begin() as connection:
        assert logs.insert(connection, [NewChunk(task, attempt, part, run, step, encode(list(lines)))]) == 1
