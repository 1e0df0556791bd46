"""Cancels open tasks in bulk: those of a queue, a name, a run or a state, up to a time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.states import OPEN_TASK_STATES, TaskState
from orchestrator.store.inbox import RequestKind
from orchestrator.store.sql import Prepared, Statement

MAX_CANCELLED_AT_ONCE = 10_000
"""Tasks to cancel at once: each is a separate request to the leader."""


class OpenFilter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Conditions on open tasks. A condition that is None matches every task."""

    statuses: tuple[TaskState, ...] = ()
    queue: str | None = None
    name: str | None = None
    run: UUID | None = None
    until: datetime | None = None
    """Enqueued up to this time, so that tasks enqueued after a preview are left alone."""


class OpenGroup(NamedTuple):
    """Open tasks of one name in one queue and state."""

    name: str
    queue: str
    status: str
    tasks: int


# Turn tasks are not cancelled: their runs are.
_MATCHING = f"""
SELECT id, name, queue, status FROM orchestrator.tasks
 WHERE status = ANY(%(statuses)s::text[]) AND (%(queue)s::text IS NULL OR queue = %(queue)s::text)
   AND (%(name)s::text IS NULL OR name = %(name)s::text)
   AND (%(run)s::uuid IS NULL OR run_id = %(run)s::uuid) AND id IS DISTINCT FROM run_id
   AND (%(until)s::timestamptz IS NULL OR created_at <= %(until)s::timestamptz)
   AND (%(within)s::text = '' OR starts_with(queue, %(within)s::text))
 ORDER BY id LIMIT {MAX_CANCELLED_AT_ONCE}
"""
_PREVIEW = Statement[OpenGroup](f"""
SELECT /* cancels.preview */ name, queue, status, count(*) AS tasks FROM ({_MATCHING}) AS found
 GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 2, 3
""")
_ASK = Statement[None](f"""
INSERT /* cancels.ask */ INTO orchestrator.inbox (kind, target)
SELECT '{RequestKind.CANCEL_TASK}', id FROM ({_MATCHING}) AS found ORDER BY id
""")


def preview(connection: Connection, wanted: OpenFilter, within: str = "") -> list[OpenGroup]:
    """Return the tasks that would be cancelled as groups, largest first; only queues whose names begin with `within`.

    At most `MAX_CANCELLED_AT_ONCE` tasks are grouped, the oldest ones.
    """
    return _PREVIEW(connection, _parameters(wanted), within=within)


def request_cancel(connection: Connection, wanted: OpenFilter, within: str = "") -> int:
    """Ask the leader to cancel the matching tasks; return their number."""
    return _ASK.count(connection, _parameters(wanted), within=within)


@Statement.function(f"""
INSERT /* cancels.withdraw */ INTO orchestrator.inbox (kind, target)
SELECT '{RequestKind.WITHDRAW_TASK}', id FROM unnest(%(tasks)s::uuid[]) AS asked(id)
""")
def request_withdrawal(connection: Connection, tasks: Sequence[bytes]) -> None:
    """Ask the leader to cancel tasks that were not dispatched yet."""


@Prepared.function(f"""
SELECT /* cancels.unstarted */ id FROM orchestrator.tasks
 WHERE id = ANY (%(tasks)s::uuid[]) AND status = '{TaskState.PENDING}' AND attempt = 0
""")
def unstarted(connection: Connection, tasks: Sequence[bytes]) -> list[bytes]:
    """Return the tasks that were never dispatched."""


def _parameters(wanted: OpenFilter) -> dict[str, object]:
    return {
        "statuses": [str(state) for state in wanted.statuses or OPEN_TASK_STATES],
        "queue": wanted.queue,
        "name": wanted.name,
        "run": wanted.run and wanted.run.hex,
        "until": wanted.until,
    }
