"""The audit log: who did what to which object, when and from where. The action's own transaction inserts the entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.access import masked
from orchestrator.domain.plain import stored_json
from orchestrator.store.inbox import RequestKind
from orchestrator.store.sql import Row, Statement
from orchestrator.store.tasks.revival import KEEPS_KEY, REVIVABLE


@dataclass(frozen=True, kw_only=True)
class AuditEntry:
    """One entry of the audit log."""

    id: int
    at: datetime
    who: str
    """An API key, a user of the proxy in front of the API, or the user and host of a process."""
    origin: str
    """The origin of the action: an address, or host and process."""
    act: str
    """The action, in a word: cancel, retry, pause, …; `refused` for requests that were not allowed."""
    kind: str
    """The type of the object."""
    target: str
    """The id or name of the object."""
    detail: dict[str, Any]
    """Further details; no arguments and no values."""


class AuditFilter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Conditions on audit entries. A condition that is None matches every entry."""

    who: str | None = None
    """A prefix of `who`."""
    act: str | None = None
    """cancel, retry, pause, apply, refused, …"""
    kind: str | None = None
    """The type of the object: task, run, queue, schedule, workflow, key."""
    target: str | None = None
    """The id or name of the object."""
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
"""By id, the version that the user saw: the last attempt of a task, or the end of a run in microseconds."""
NOTHING_SEEN: Seen = MappingProxyType({})
_SELECTING = {
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
"""Selects the objects whose state allows the request. A retry that must reclaim a unique key is requested by
`revival.request_retry`. A child run is deleted with its parent."""
_STORING = {
    RequestKind.DELETE_RUN: """INSERT INTO orchestrator.deletions (run_id) SELECT id FROM fitting
    ON CONFLICT (run_id) DO UPDATE SET run_id = EXCLUDED.run_id RETURNING run_id"""
}
"""The statements of requests that do not go to the inbox."""
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
    for request, fitting in _SELECTING.items()
}
_MAX_FIELD = 300
"""Characters per field: some fields come from outside."""


def add(
    connection: Connection, *, who: str, origin: str, act: str, kind: str, target: str, detail: Mapping[str, Any]
) -> None:
    """Insert an entry, in the transaction of the action."""
    _ADD(connection, _entry_columns(who=who, origin=origin, act=act, kind=kind, target=target, detail=detail))


def insert_request(connection: Connection, request: RequestKind, run: bytes, body: str, **entry: Any) -> bool:
    """Insert a request about a run and an audit entry, in one statement. Return False if a message came too late."""
    statement = _SEND if request in _MESSAGES else _ASK
    return statement.first(connection, _entry_columns(**entry), request=str(request), run=run, body=body) is not None


def insert_requests(
    connection: Connection, request: RequestKind, targets: Sequence[bytes], seen: Seen = NOTHING_SEEN, **entry: Any
) -> set[UUID]:
    """Insert the same request about several tasks or runs, with audit entries; return the ids whose state allows it.

    An object that has changed since the user saw it (`seen`) is skipped.
    """
    return {*_ASK_ALL[request](connection, _entry_columns(**entry), ids=targets, seen=stored_json(dict(seen)))}


def _entry_columns(*, detail: Mapping[str, Any], **texts: str) -> dict[str, str]:
    fields = {name: masked(text.replace("\0", ""))[:_MAX_FIELD] for name, text in texts.items()}
    return fields | {"detail": stored_json(dict(detail))}


_MATCHES = """(%(who)s::text IS NULL OR starts_with(who, %(who)s::text))
   AND (%(act)s::text IS NULL OR act = %(act)s::text)
   AND (%(kind)s::text IS NULL OR kind = %(kind)s::text)
   AND (%(target)s::text IS NULL OR target = %(target)s::text)
   AND (%(since)s::timestamptz IS NULL OR at >= %(since)s::timestamptz)
   AND (%(until)s::timestamptz IS NULL OR at < %(until)s::timestamptz)"""
_COLUMNS = "id, at, who, origin, act, kind, target, detail"
_BEFORE = "(%(before)s::bigint IS NULL OR id < %(before)s::bigint)"
MAX_SCANNED = 10_000
"""Entries scanned for one page where no index finds the matching entries."""
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
    return msgspec.structs.asdict(wanted)


class AuditPage(NamedTuple):
    """A page of the matching entries."""

    lines: list[AuditEntry]
    next: int | None
    """The `before` of the next page; None on the last page."""


def page(connection: Connection, wanted: AuditFilter, *, limit: int, before: int | None = None) -> AuditPage:
    """Return the newest matching entries, newest first.

    The number of scanned entries is bounded, so a page may have few entries or none without being the last.
    """
    is_walked = wanted != AuditFilter() and wanted.target is None
    horizon = _HORIZON.first(connection, before=before, most=MAX_SCANNED) if is_walked else None
    entries = _LIST(connection, _parameters(wanted), limit=limit, before=before, horizon=horizon)
    return AuditPage(entries, entries[-1].id if len(entries) == limit else horizon)


def list_page(
    connection: Connection, wanted: AuditFilter, *, limit: int, before: int | None = None
) -> list[AuditEntry]:
    """Return up to `limit` matching entries, reading as many pages as needed."""
    entries: list[AuditEntry] = []
    while True:
        lines, before = page(connection, wanted, limit=limit - len(entries), before=before)
        entries += lines
        if before is None or len(entries) == limit:
            return entries


def newer(connection: Connection, wanted: AuditFilter, after: int) -> list[AuditEntry]:
    """Return entries with a larger id, oldest first. Entries with a smaller id may still be committed later."""
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
    """Return how, by whom and when a promise or an approval of a run was last decided, if the log still has the entry.

    Without a name, return the run's last decision, with its name.
    """
    row = _DECISION.first(connection, run=run, name=name, most=MAX_SCANNED)
    if row is None:
        return None
    act = row.detail.get("decision") or _DECIDED.get(row.act, row.act)
    value = f" with {row.detail['value']}" if "value" in row.detail else ""
    reason = row.detail.get("why") or row.detail.get("reason")
    in_parentheses = f" ({reason})" if reason else ""
    subject = "" if name is not None else f"{row.detail.get('node') or row.detail.get('name')!r} was "
    return f"{subject}{act}{value} by {row.who} at {row.at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC{in_parentheses}"


def last_act(connection: Connection, target: str, act: str, since: datetime | None = None) -> str | None:
    """Return by whom and when an action was last taken on a task or a run, if the log still has the entry."""
    entries = page(connection, AuditFilter(target=target, act=act, since=since), limit=1).lines
    return next((f"by {entry.who} at {entry.at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" for entry in entries), None)


_ORIGIN = Statement[str]("""
SELECT /* audit.origin */ target
  FROM (SELECT act, target, detail FROM orchestrator.audit
         WHERE at BETWEEN %(at)s::timestamptz - interval '10 seconds' AND %(at)s::timestamptz + interval '10 seconds'
         ORDER BY at LIMIT %(most)s) AS lately
 WHERE act = 'rerun' AND detail->>'new' = %(run)s LIMIT 1
""")


def origin(connection: Connection, run: UUID, created_at: datetime) -> str | None:
    """Return the id of the run of which `run` is a rerun, if the log still has the entry."""
    return _ORIGIN.first(connection, run=str(run), at=created_at, most=MAX_SCANNED)


_PRUNE = Statement[None]("""
DELETE /* audit.prune */ FROM orchestrator.audit WHERE id = ANY (ARRAY(
       SELECT id FROM orchestrator.audit WHERE at < now() - %(seconds)s::double precision * interval '1 second'
        ORDER BY at LIMIT %(limit)s))
""")


def prune(connection: Connection, seconds: float, limit: int) -> int:
    """Delete entries older than `seconds`, oldest first; return their number."""
    return _PRUNE.count(connection, seconds=seconds, limit=limit)
