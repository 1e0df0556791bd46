"""A mirror of the workers' heartbeats, for people to look at."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.store.sql import Statement

_MIRROR = Statement[None]("""
INSERT /* fleet.mirror */ INTO orchestrator.workers AS w
       (id, host, pid, queues, names, slots, running, state, started_at, seen_at, still_since, holds)
SELECT b.id, b.host, b.pid, ARRAY(SELECT jsonb_array_elements_text(b.queues)),
       ARRAY(SELECT jsonb_array_elements_text(b.names)), b.slots, b.running, b.state,
       to_timestamp(b.started_at), %(now)s::timestamptz, %(now)s::timestamptz - b.still * interval '1 second',
       ARRAY(SELECT jsonb_array_elements_text(b.holds)::uuid)
  FROM jsonb_to_recordset(%(beats)s::jsonb)
       AS b(id text, host text, pid int, queues jsonb, names jsonb, slots int, running int, state text,
            started_at float8, still float8, holds jsonb)
    ON CONFLICT (id) DO UPDATE
   SET queues = excluded.queues, names = excluded.names, slots = excluded.slots, running = excluded.running,
       state = excluded.state, seen_at = excluded.seen_at, still_since = excluded.still_since, holds = excluded.holds
""")


class WorkerRow(NamedTuple):
    """One worker process."""

    id: str
    host: str
    pid: int
    queues: list[str]
    names: list[str]
    slots: int
    running: int
    state: str
    started_at: float
    still: float | None = None
    """Seconds for which its process has done nothing, if that is too long."""
    holds: Sequence[str] = ()
    """Of one that stands still, the first tasks that it holds."""


def mirror(connection: Connection, workers: Sequence[WorkerRow], now: datetime) -> None:
    """Write down what the heartbeats say."""
    beats = json.dumps([worker._asdict() for worker in workers])
    _MIRROR(connection, beats=beats, now=now)


_GONE = Statement[None]("""
UPDATE /* fleet.gone */ orchestrator.workers
   SET state = CASE WHEN state = 'draining' OR id = ANY(%(stopped)s::text[]) THEN 'stopped' ELSE 'dead' END,
       running = 0, still_since = NULL, holds = '{}'
 WHERE (state NOT IN ('dead', 'stopped') AND NOT (id = ANY(%(live)s::text[])))
    OR (state = 'dead' AND id = ANY(%(stopped)s::text[]))
""")
_FORGET = Statement[None]("""
DELETE /* fleet.forget */ FROM orchestrator.workers
 WHERE (state = 'dead' AND seen_at < %(now)s::timestamptz - interval '1 hour')
    OR (state = 'stopped' AND seen_at < %(now)s::timestamptz - interval '1 minute')
""")


def mark_gone(connection: Connection, live: Sequence[str], stopped: Sequence[str], now: datetime) -> None:
    """Mark every other worker as dead, or as stopped where it was draining or has said so; forget them after an hour,
    or a minute."""
    _GONE(connection, live=live, stopped=stopped)
    _FORGET(connection, now=now)
