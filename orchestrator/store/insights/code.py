"""Runs of workflows as code: what they were given, what they wait for, and what came of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.domain.code import history
from orchestrator.domain.code.other_runs import WAIT
from orchestrator.domain.runs.verdict import GOES_ON
from orchestrator.sealing import CALL, reveal
from orchestrator.store.code import histories
from orchestrator.store.code import reads as code_reads
from orchestrator.store.insights.attempts import ErrorView, error_view
from orchestrator.store.sql import Row, Statement
from orchestrator.store.tables.tasks import DELAYED, NOBODY

_MOST = 10
"""Of each kind that is open, so many are shown."""
_MOST_UNSEEN = 1_000
"""Messages that are counted."""


@dataclass(frozen=True, kw_only=True)
class OpenView:
    """Something that a run has asked for, and that has not ended."""

    kind: str
    """promise, run (another one, whose end it waits for), timer, task or child."""
    name: str
    """What the code calls it; of a timer maybe nothing."""
    id: UUID
    """Its id; of a task or a child, the one to look at."""
    due: datetime | None
    """When a timer fires, or a delayed task is due."""
    status: str | None
    """Where a task or a child stands."""


@dataclass(frozen=True, kw_only=True)
class ResetView:
    """Which run another one repeats."""

    run: UUID
    """That run."""
    to: int
    """The last of its events that is repeated."""
    reason: str
    """Why, if somebody said so."""


@dataclass(frozen=True, kw_only=True)
class CodeView:
    """What a run of code has beside its counters. Values are encoded, as they are stored."""

    payload: bytes
    """Its arguments."""
    result: bytes | None
    """What it returned."""
    error: ErrorView | None
    """How it failed."""
    state: Mapping[str, bytes]
    """What its code has set for people to see."""
    turn: str | None
    """Its code is `waiting`, `ready` for a worker, `unknown` to all workers, or `running`; None when it has ended."""
    places: tuple[str, ...]
    """Where in the code it waits, as the worker said that ran it last."""
    signals: tuple[str, ...]
    """Names of signals that it waits for."""
    updates: tuple[str, ...]
    """Names of updates that have no answer yet."""
    waits_for: tuple[OpenView, ...]
    """The first of what it has asked for that has not ended."""
    more: bool
    """There is more of that."""
    reset: ResetView | None = None
    """Which run it repeats, if it was made by a reset."""
    run: UUID | None = None
    """Its id; None from a server of the previous release."""
    handlers: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    """What its code answers: `query`, `update` or `signal`, the name, and the names of the arguments."""
    unseen: int = 0
    """How many signals and updates its code has not been shown; a thousand stands for more."""


_NOW = Statement[Row](f"""
SELECT /* insights.code.now */ CASE WHEN r.ended_at IS NOT NULL THEN NULL
            WHEN t.status <> 'pending' THEN 'running'
            WHEN {NOBODY} THEN 'unknown'
            WHEN t.blockers > 0 THEN 'waiting' ELSE 'ready' END AS turn, r.waiting,
       (SELECT count(*) FROM (
               SELECT FROM orchestrator.histories WHERE run_id = r.id AND number > r.shown AND r.ended_at IS NULL
                  AND kind IN ('signal_received', 'update_requested') LIMIT {_MOST_UNSEEN}) AS new) AS unseen
  FROM orchestrator.runs r LEFT JOIN orchestrator.tasks t ON t.id = r.id
 WHERE r.id = %(run)s::uuid AND r.code
""")
_OPEN = Statement[OpenView](f"""
(SELECT /* insights.code.open */ CASE WHEN r.id IS NULL THEN 'promise' ELSE 'run' END AS kind,
        coalesce(r.name, p.name) AS name, coalesce(r.id, p.id) AS id, NULL::timestamptz AS due, r.status
   FROM orchestrator.promises p
   LEFT JOIN orchestrator.runs r ON r.id = CASE WHEN p.name ~ '^{WAIT}[0-9a-f-]{{36}}$' THEN substr(p.name, 5)::uuid END
  WHERE p.run_id = %(run)s::uuid ORDER BY p.ordinal LIMIT {_MOST + 1})
 UNION ALL
(SELECT 'timer', '', id, due, NULL FROM orchestrator.timers
  WHERE run_id = %(run)s::uuid ORDER BY due LIMIT {_MOST + 1})
 UNION ALL
(SELECT 'task', name, id, CASE WHEN {DELAYED} THEN wake_at END, status FROM orchestrator.tasks
  WHERE run_id = %(run)s::uuid AND id <> run_id ORDER BY id LIMIT {_MOST + 1})
 UNION ALL
(SELECT 'child', name, id, NULL, CASE WHEN stuck IS NULL THEN status ELSE 'stuck' END FROM orchestrator.runs
  WHERE parent_run = %(run)s::uuid AND ended_at IS NULL ORDER BY id LIMIT {_MOST + 1})
""")


def show_code(connection: Connection, run: UUID) -> CodeView | None:
    """Return what there is to see of a run of code, or None if it is no such run."""
    row = _NOW.first(connection, run=run.hex)
    outcome = code_reads.outcome(connection, run.bytes)
    if row is None or outcome is None:
        return None
    open_ = _OPEN(connection, run=run.hex)
    has_timers = any(view.kind == "timer" for view in open_)
    payload, state, timers = b"", dict[str, bytes](), dict[bytes, str]()
    reset: ResetView | None = None
    for what in histories.said_by_code(connection, run.bytes, with_timers=has_timers):
        match what:
            case history.RunStarted():
                payload = reveal(what.payload, CALL)
            case history.RunReset(run=other, to=to, reason=reason):
                reset = ResetView(run=UUID(bytes=other), to=to, reason=reason)
            case history.StateSet(key=key, value=value, attribute=""):
                state[key] = reveal(value)
            case history.StateCleared(key=key, is_attribute=False):
                state.pop(key, None)
            case history.TimerStarted():
                timers[what.id] = what.name
    shown = [view for kind in ("promise", "run", "timer", "task", "child") for view in _of_kind(open_, kind)[:_MOST]]
    waiting = row.waiting or {}
    return CodeView(
        payload=payload,
        result=reveal(outcome.result) if outcome.reason not in GOES_ON else None,
        error=error_view(outcome.error),
        state=state,
        turn=row.turn,
        places=tuple(waiting.get("places", ())),
        signals=tuple(waiting.get("signals", ())),
        updates=tuple(waiting.get("updates", ())),
        waits_for=tuple(_named(view, timers) for view in shown),
        more=len(shown) < len(open_),
        reset=reset,
        run=run,
        handlers=tuple((kind, name, tuple(names)) for kind, name, names in waiting.get("handlers", ())),
        unseen=row.unseen,
    )


def _of_kind(views: list[OpenView], kind: str) -> list[OpenView]:
    return [view for view in views if view.kind == kind]


def _named(view: OpenView, timers: Mapping[bytes, str]) -> OpenView:
    if view.kind != "timer":
        return view
    return OpenView(kind="timer", name=timers.get(view.id.bytes, ""), id=view.id, due=view.due, status=None)
