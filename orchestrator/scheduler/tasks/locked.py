"""Tasks whose rows another transaction has locked: what concerns them is kept in the inbox, and nothing waits."""

from __future__ import annotations

import base64
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.outcomes import Report
from orchestrator.domain.tasks.task import Failed, Lost, Noted, Returned
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store import inbox
from orchestrator.store.inbox import NewRequest, Request, RequestKind
from orchestrator.store.tasks import locks
from orchestrator.telemetry import get_logger
from orchestrator.transport.codec import decode, encode, prepare

log = get_logger("scheduler")
prepare(Report)

Reported = tuple[str, str, Report]
"""Entry id, worker and report."""
VERDICT = "reconcile"
"""The entry id of the reconciler's own reports. It repeats them while they are true."""
BEYOND_COMPLETION = (Failed, Lost, Returned, Noted)
"""Reports that may arrive while a transaction of the same attempt commits."""
_LONG, _LOG_INTERVAL = 5.0, 10.0
"""Seconds after which a lock is logged, and between two log entries."""


@dataclass
class LockedTasks:
    """Finds locked tasks, and keeps the reports about them."""

    _kept: set[bytes] = field(default_factory=set)
    """Tasks with kept reports. Later reports about them are kept as well, so that they are applied in order."""
    _logged_at: float = -_LOG_INTERVAL

    def keep(self, tx: Transaction, reports: Sequence[Reported]) -> Sequence[Reported]:
        """Return the reports that can be applied now. Keep the others for a later tick.

        Other kinds of reports meet a lock only if a person holds it. A bisecting tick checks them, too.
        """
        kinds = Report if tx.is_bisecting else BEYOND_COMPLETION
        ids = {_task_of(report) for _, _, report in reports if isinstance(report, kinds)} - {b""}
        if not ids:
            return reports
        locked = locks.lock(tx.connection, ids - self._kept) | (ids & self._kept)
        if not locked:
            return reports
        tx.result.wake.requests = tx.result.wake.contested = True
        kept = [reported for reported in reports if _task_of(reported[2]) in locked and reported[0] != VERDICT]
        self._kept.update(_task_of(report) for _, _, report in kept)
        inbox.add_all(tx.connection, RequestKind.REPORT, [_request(worker, report) for _, worker, report in kept])
        return [reported for reported in reports if _task_of(reported[2]) not in locked]

    def take(self, tx: Transaction, items: Sequence[Request]) -> tuple[list[Reported], list[int]]:
        """Return the kept reports that can be applied now, and the requests of the others."""
        targets = {item.target for item in items}
        locked = self.among(tx, targets, items)
        self._kept |= locked
        self._kept -= targets - locked
        return [_reported(item) for item in items if item.target not in locked], [
            item.id for item in items if item.target in locked
        ]

    def among(self, tx: Transaction, ids: Collection[bytes], items: Sequence[Request]) -> set[bytes]:
        """Return the locked ones of these tasks, and log who has locked one that requests have waited for."""
        locked = locks.lock(tx.connection, ids)
        tx.result.wake.contested |= bool(locked)
        waiting = [item for item in items if item.target in locked and item.age >= _LONG]
        if waiting and time.monotonic() >= self._logged_at + _LOG_INTERVAL:
            self._logged_at = time.monotonic()
            first = waiting[0]
            log.warning(
                "task.locked request=%r waited=%.0f others=%d holder=%s: a transaction has locked the task's row. End "
                "it, or wait; everything else continues",
                first.kind,
                first.age,
                len({item.target for item in waiting}) - 1,
                locks.holder(tx.connection, [first.target]),
                extra={"task_id": to_text(first.target)},
            )
        return locked


def _task_of(report: Report) -> bytes:
    return getattr(report, "id", b"")


class _Kept(msgspec.Struct):
    """The body of a REPORT request."""

    worker: str
    report: str


def _request(worker: str, report: Report) -> NewRequest:
    body = _Kept(worker, base64.b64encode(encode(report)).decode())
    return NewRequest(_task_of(report), msgspec.json.encode(body).decode())


def _reported(item: Request) -> Reported:
    body = msgspec.convert(item.body, _Kept)
    return f"inbox/{item.id}", body.worker, decode(Report, base64.b64decode(body.report))  # type: ignore[arg-type]
