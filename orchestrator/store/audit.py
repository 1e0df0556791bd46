"""The audit log: who did what to which thing, when, from where. A line is written by the transaction that does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.domain.access import masked
from orchestrator.domain.plain import stored_json
from orchestrator.store.inbox import RequestKind
from orchestrator.store.sql import Row, Statement
from orchestrator.store.tasks.revival import KEEPS_KEY, REVIVABLE


@dataclass(frozen=True, kw_only=True)
class AuditEntry:
    """One line of the audit log."""

    id: int
    at: datetime
    who: str
    """A key of the HTTP API, a user of the proxy in front of it, or the user and host of a process."""
    origin: str
    """From where: an address, or host and process."""
    act: str
    """The action, in a word: cancel, retry, pause, …; `refused` for requests that were not allowed."""
    kind: str
    """To what kind of thing."""
    target: str
    """Its id or name."""
    detail: dict[str, Any]
    """Further details; no arguments and no values."""


@dataclass(frozen=True, kw_only=True)
class AuditFilter:
    """Which lines are wanted; what is not given does not matter."""

    who: str | None = None
    """Begins so."""
    act: str | None = None
    """cancel, retry, pause, apply, refused, …"""
    kind: str | None = None
    """Of what it was done to: task, run, queue, schedule, workflow, key."""
    target: str | None = None
    """An id or a name."""
    since: datetime | None = None
    until: datetime | None = None


_ADD = Statement[None]("""
INSERT /* audit.add */ INTO orchestrator.audit (who, origin, act, kind, target, detail)
VALUES (%(who)s, %(origin)s, %(act)s, %(kind)s, %(target)s, %(detail)s::jsonb)
""")
_ASK = Statement[int]("""
WITH /* audit.ask */ written AS (
    INSERT INTO orchestrator.audit (who, origin, act, kind, target, detail)
    VALUES (%(who)s, %(origin)s, %(act)s, %(kind)s, %(target)s, %(detail)s::jsonb)
)
INSERT INTO orchestrator.inbox (kind, target, body)
VALUES (%(request)s, %(run)s::uuid, %(body)s::jsonb) RETURNING id
""")
_SEND = Statement[int]("""
WITH /* audit.send */ open AS MATERIALIZED (
    SELECT id FROM orchestrator.runs WHERE id = %(run)s::uuid AND ended_at IS NULL FOR KEY SHARE
), written AS (
    INSERT INTO orchestrator.audit (who, origin, act, kind, target, detail)
    SELECT %(who)s, %(origin)s, %(act)s, %(kind)s, %(target)s, %(detail)s::jsonb FROM open
)
INSERT INTO orchestrator.inbox (kind, target, body) SELECT %(request)s, id, %(body)s::jsonb FROM open RETURNING id
""")
"""Waits while the leader stores the end of the run: `turns.append_last`."""
_MESSAGES = frozenset({RequestKind.SIGNAL, RequestKind.UPDATE})
_INBOX = """INSERT INTO orchestrator.inbox (kind, target, body)
SELECT '{}', id, CASE WHEN last IS NOT NULL THEN jsonb_build_object('attempt', last) END FROM fitting
RETURNING target"""
_SEEN = "(%(seen)s::jsonb->>id::text)"
Seen = Mapping[str, str]
"""By id, what somebody saw who asks: the last attempt of a task that is meant, or the end of a run in microseconds."""
NOTHING_SEEN: Seen = MappingProxyType({})
_FITTING = {
    RequestKind.CANCEL_RUN: "runs WHERE id = ANY(%(ids)s::uuid[]) AND ended_at IS NULL",
    RequestKind.RETRY_RUN: f"""runs WHERE id = ANY(%(ids)s::uuid[]) AND (
           (status = 'failed' AND NOT code AND parent_step IS NULL) OR (stuck IS NOT NULL AND ended_at IS NULL))
       AND ({_SEEN} IS NULL
            OR {_SEEN}::bigint IS NOT DISTINCT FROM (extract(epoch FROM ended_at) * 1000000)::bigint)""",
    RequestKind.DELETE_RUN: """runs r WHERE id = ANY(%(ids)s::uuid[]) AND ended_at IS NOT NULL AND NOT closing
       AND (parent_run IS NULL OR NOT EXISTS (SELECT FROM orchestrator.runs p WHERE p.id = r.parent_run))""",
    RequestKind.CANCEL_TASK: f"tasks WHERE id = ANY(%(ids)s::uuid[]) AND coalesce(attempt <= {_SEEN}::bigint, true)",
    RequestKind.RETRY_TASK: f"""ended_tasks e WHERE id = ANY(%(ids)s::uuid[])
       AND (status IN ('failed', 'skipped') OR (status = 'cancelled' AND run_id IS NULL))
       AND coalesce(attempt = {_SEEN}::bigint, true) AND {KEEPS_KEY} IS NULL AND {REVIVABLE}""",
}
"""What is in a state for a request. A task that takes a unique key back asks for it by itself: `revival.ask`. A child
run is deleted with its parent."""
_STORING = {
    RequestKind.DELETE_RUN: """INSERT INTO orchestrator.deletions (run_id) SELECT id FROM fitting
    ON CONFLICT (run_id) DO UPDATE SET run_id = EXCLUDED.run_id RETURNING run_id"""
}
"""Where a request goes, if that is not the inbox."""
_ASK_ALL = {
    request: Statement[UUID](f"""
WITH /* audit.ask_to_{request.replace(" ", "_")} */ fitting AS MATERIALIZED (
    SELECT id, {f"{_SEEN}::bigint" if request is RequestKind.RETRY_TASK else "NULL"} AS last FROM orchestrator.{fitting}
), written AS (
    INSERT INTO orchestrator.audit (who, origin, act, kind, target, detail)
    SELECT %(who)s, %(origin)s, %(act)s, %(kind)s, id::text, %(detail)s::jsonb FROM fitting
)
{_STORING.get(request, _INBOX.format(request))}
""")
    for request, fitting in _FITTING.items()
}
_LONGEST = 300
"""Characters of one field: some come from outside."""


def add(
    connection: Connection, *, who: str, origin: str, act: str, kind: str, target: str, detail: Mapping[str, Any]
) -> None:
    """Write a line, in the transaction of the action."""
    _ADD(connection, _line(who=who, origin=origin, act=act, kind=kind, target=target, detail=detail))


def ask(connection: Connection, request: RequestKind, run: bytes, body: str, **line: Any) -> bool:
    """Ask the leader for a change of a run, and write a line of it: one statement. False if a message came too late."""
    statement = _SEND if request in _MESSAGES else _ASK
    return statement.first(connection, _line(**line), request=str(request), run=run, body=body) is not None


def ask_all(
    connection: Connection, request: RequestKind, targets: Sequence[bytes], seen: Seen = NOTHING_SEEN, **line: Any
) -> set[UUID]:
    """Ask the leader for the same about tasks or runs; return those that are in a state for it, and are asked for.

    One that has moved on since it was `seen` is not.
    """
    return {*_ASK_ALL[request](connection, _line(**line), ids=targets, seen=stored_json(dict(seen)))}


def _line(*, detail: Mapping[str, Any], **texts: str) -> dict[str, str]:
    cut = {name: masked(text.replace("\0", ""))[:_LONGEST] for name, text in texts.items()}
    return cut | {"detail": stored_json(dict(detail))}


_MATCHES = """(%(who)s::text IS NULL OR starts_with(who, %(who)s::text))
   AND (%(act)s::text IS NULL OR act = %(act)s::text)
   AND (%(kind)s::text IS NULL OR kind = %(kind)s::text)
   AND (%(target)s::text IS NULL OR target = %(target)s::text)
   AND (%(since)s::timestamptz IS NULL OR at >= %(since)s::timestamptz)
   AND (%(until)s::timestamptz IS NULL OR at < %(until)s::timestamptz)"""
_COLUMNS = "id, at, who, origin, act, kind, target, detail"
_BEFORE = "(%(before)s::bigint IS NULL OR id < %(before)s::bigint)"
MOST_LOOKED_AT = 10_000
"""Lines that are looked at for one page, where no index leads to those that are wanted."""
_HORIZON = Statement[int](f"""
SELECT /* audit.horizon */ id FROM orchestrator.audit WHERE {_BEFORE} ORDER BY id DESC OFFSET %(most)s LIMIT 1
""")
_LIST = Statement[AuditEntry](f"""
SELECT /* audit.list */ {_COLUMNS} FROM orchestrator.audit
 WHERE {_BEFORE} AND (%(horizon)s::bigint IS NULL OR id >= %(horizon)s::bigint) AND {_MATCHES}
 ORDER BY id DESC LIMIT %(limit)s
""")
_NEWER = Statement[AuditEntry](f"""
SELECT /* audit.newer */ {_COLUMNS} FROM orchestrator.audit
 WHERE id > %(after)s::bigint AND {_MATCHES} ORDER BY id
""")


def _parameters(wanted: AuditFilter) -> dict[str, object]:
    return {name: getattr(wanted, name) for name in AuditFilter.__dataclass_fields__}


class AuditPage(NamedTuple):
    """Some of the lines that match."""

    lines: list[AuditEntry]
    next: int | None
    """The `before` of the page after this one; None if there are no more."""


def page(connection: Connection, wanted: AuditFilter, *, limit: int, before: int | None = None) -> AuditPage:
    """Return the newest lines that match, newest first.

    It looks at a bounded number of lines, and so a page may have few of them, or none, and yet not be the last.
    """
    is_walked = wanted != AuditFilter() and wanted.target is None
    horizon = _HORIZON.first(connection, before=before, most=MOST_LOOKED_AT) if is_walked else None
    found = _LIST(connection, _parameters(wanted), limit=limit, before=before, horizon=horizon)
    return AuditPage(found, found[-1].id if len(found) == limit else horizon)


def list_page(
    connection: Connection, wanted: AuditFilter, *, limit: int, before: int | None = None
) -> list[AuditEntry]:
    """Return as many lines that match as are asked for, if there are so many: page after page."""
    found: list[AuditEntry] = []
    while True:
        lines, before = page(connection, wanted, limit=limit - len(found), before=before)
        found += lines
        if before is None or len(found) == limit:
            return found


def newer(connection: Connection, wanted: AuditFilter, after: int) -> list[AuditEntry]:
    """Return the lines with a larger id, oldest first; one with a smaller id may still be committed after them."""
    return _NEWER(connection, _parameters(wanted), after=after)


_DECISION = Statement[Row]("""
SELECT /* audit.decision */ who, at, act, detail
  FROM (SELECT * FROM orchestrator.audit WHERE target = %(run)s ORDER BY id DESC LIMIT %(most)s) AS lately
 WHERE act IN ('approved', 'rejected', 'decide', 'resolve', 'reject')
   AND (%(name)s::text IS NULL OR %(name)s::text IN (detail->>'name', detail->>'key', detail->>'node'))
 ORDER BY id DESC LIMIT 1
""")
_DECIDED = {"resolve": "resolved", "reject": "rejected"}


def decision(connection: Connection, run: str, name: str | None = None) -> str | None:
    """Say how, by whom and when a promise or an approval of a run was last decided, if the log still has it.

    Without a name, the last decision of the run counts, and is named.
    """
    row = _DECISION.first(connection, run=run, name=name, most=MOST_LOOKED_AT)
    if row is None:
        return None
    act = row.detail.get("decision") or _DECIDED.get(row.act, row.act)
    value = f" with {row.detail['value']}" if "value" in row.detail else ""
    why = row.detail.get("why") or row.detail.get("reason")
    because = f" ({why})" if why else ""
    what = "" if name is not None else f"{row.detail.get('node') or row.detail.get('name')!r} was "
    return f"{what}{act}{value} by {row.who} at {row.at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC{because}"


def last_act(connection: Connection, target: str, act: str, since: datetime | None = None) -> str | None:
    """Say by whom and when something was last done to a task or a run, if the log still has it."""
    found = page(connection, AuditFilter(target=target, act=act, since=since), limit=1).lines
    return next((f"by {one.who} at {one.at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" for one in found), None)


_ORIGIN = Statement[str]("""
SELECT /* audit.origin */ target
  FROM (SELECT act, target, detail FROM orchestrator.audit
         WHERE at BETWEEN %(at)s::timestamptz - interval '10 seconds' AND %(at)s::timestamptz + interval '10 seconds'
         ORDER BY at LIMIT %(most)s) AS lately
 WHERE act = 'rerun' AND detail->>'new' = %(run)s LIMIT 1
""")


def origin(connection: Connection, run: UUID, created_at: datetime) -> str | None:
    """Return the id of the run that a run was started over from, or with changes, if the log still has it."""
    return _ORIGIN.first(connection, run=str(run), at=created_at, most=MOST_LOOKED_AT)


_PRUNE = Statement[None]("""
DELETE /* audit.prune */ FROM orchestrator.audit WHERE id = ANY (ARRAY(
       SELECT id FROM orchestrator.audit WHERE at < now() - %(seconds)s::double precision * interval '1 second'
        ORDER BY at LIMIT %(limit)s))
""")


def prune(connection: Connection, seconds: float, limit: int) -> int:
    """Forget lines that are older than so many seconds, the oldest first; return how many."""
    return _PRUNE.count(connection, seconds=seconds, limit=limit)
