"""Fire schedules in the tick's transaction: start the runs that are due, and store the next fire times.

Each fire starts exactly one run. The run and the next fire time are written together under the leader's term, and the
fire time is part of the run's key, so that clock changes start no run twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice

import msgspec

from orchestrator.domain.ids import time_ordered_id
from orchestrator.domain.plain import REFUSALS
from orchestrator.domain.schedules.schedule import Schedule, decide, delay_of, fire_key, fires, key_of, next_fire
from orchestrator.errors import InvalidWorkflow
from orchestrator.scheduler.code.runs import ask_to_cancel
from orchestrator.scheduler.runs.cancels import Cancels
from orchestrator.scheduler.runs.creation import create_runs
from orchestrator.scheduler.runs.direct import create_begun
from orchestrator.scheduler.transaction import Transaction, affects_everything, isolate
from orchestrator.store.driver import savepoint
from orchestrator.store.postgres_errors import error_line
from orchestrator.store.runs.creation import NewRun
from orchestrator.store.schedules import backfills
from orchestrator.store.schedules import fires as store
from orchestrator.store.schedules.backfills import OpenBackfill
from orchestrator.store.schedules.fires import Advance, DueSchedule
from orchestrator.store.tasks import results
from orchestrator.telemetry import get_logger

log = get_logger("scheduler")

_FIRE_SECONDS = 0.03
"""Seconds in which a tick fires schedules. Dispatch waits, and the started runs begin in the same tick."""
_MIN_FIRES = 100
"""Fires in a tick, at least, however long they take: a tick itself costs as much as some 40 fires."""
_SLICE = 200
"""Fires in the first tick, before their duration is known, and backfill runs started in one tick."""
_MAX_BACKFILLS = 20
_UNREADABLE = (*REFUSALS, LookupError, OSError)
"""Errors for a definition that another release wrote, or a time zone unknown to this machine."""


@dataclass
class _Firing:
    """The decision about one due schedule."""

    row: DueSchedule
    next_fire: datetime | None = None
    due_at: datetime | None = None
    runs: list[tuple[datetime, NewRun]] = field(default_factory=list)
    superseded: list[bytes] = field(default_factory=list)
    """Open runs to cancel in favor of a new run."""
    skipped: int = 0
    error: str | None = None


class FirePace:
    """Limits the schedules fired in a tick by the time that earlier fires took."""

    def __init__(self) -> None:
        self.size = _SLICE

    def learn(self, fires: int, seconds: float) -> None:
        """Record the duration of `fires` fires. The limit at most doubles for the next tick."""
        in_time = int(fires * _FIRE_SECONDS / seconds) if seconds > 0 else 2 * self.size
        self.size = max(_MIN_FIRES, min(in_time, 2 * self.size))


def fire_schedules(tx: Transaction, cancels: Cancels, pace: FirePace, limit: int) -> None:
    """Fire due schedules, as many as there is time for. The rest stays due."""
    began, size = tx.budget.monotonic(), min(limit, pace.size)
    due = store.due(tx.connection, tx.now, size)
    if due:
        _fire_slice(tx, cancels, due, size)
    if len(due) == size:
        pace.learn(size, tx.budget.monotonic() - began)


def _fire_slice(tx: Transaction, cancels: Cancels, due: Sequence[DueSchedule], room: int) -> None:
    limited = [row.key for row in due if row.overlap in ("skip", "cancel_previous")]
    open_runs = store.open_runs(tx.connection, limited) if limited else {}
    isolate(
        tx,
        due,
        lambda tx, some: _write(tx, cancels, _fire(tx, some, open_runs, room)),
        lambda tx, row, error: _write(tx, cancels, [_given_up(tx, row, open_runs, error)]),
    )


def _fire(
    tx: Transaction, due: Sequence[DueSchedule], open_runs: Mapping[str, list[bytes]], room: int
) -> list[_Firing]:
    firings: list[_Firing] = []
    for row in due:
        if room <= 0:
            break
        firing = _decide_fires(tx, row, open_runs.get(row.key, []), room)
        room -= max(1, len(firing.runs) + firing.skipped)
        firings.append(firing)
    return firings


def _given_up(tx: Transaction, row: DueSchedule, open_runs: Mapping[str, list[bytes]], error: Exception) -> _Firing:
    """Skip the due fires of a schedule whose runs cannot be started. Pause the schedule if it cannot even be read."""
    reason = f"Its runs could not be stored: {error_line(error)}"
    log.error("schedule.failed schedule=%s error=%s", row.key, reason)
    try:
        firing = _decide_fires(tx, row, open_runs.get(row.key, []), _SLICE)
    except Exception as defect:  # noqa: BLE001  # any error here belongs to this schedule
        firing = _Firing(row)
        reason = f"Its next fire cannot be computed, so it no longer fires: {error_line(defect)}. Set it again."
    return replace(firing, runs=[], superseded=[], error=reason)


def _decide_fires(tx: Transaction, row: DueSchedule, open_runs: list[bytes], room: int) -> _Firing:
    firing = _Firing(row)
    try:
        schedule = msgspec.json.decode(row.definition, type=Schedule)
        delay = delay_of(schedule, row.key)
        decision = decide(schedule, row.next_fire, tx.now - delay, room)
    except _UNREADABLE as error:
        firing.error = f"Its next fire cannot be computed, so it no longer fires: {error}. Set it again."
        return firing
    firing.next_fire = decision.next_fire
    firing.due_at = decision.next_fire and decision.next_fire + delay
    _overlap(tx, firing, schedule, decision.fires, open_runs)
    return firing


def _overlap(
    tx: Transaction, firing: _Firing, schedule: Schedule, fire_times: Sequence[datetime], open_runs: list[bytes]
) -> None:
    """Start the runs that the schedule's overlap policy allows beside its open runs."""
    if schedule.overlap == "cancel_previous":
        firing.skipped += len(fire_times[:-1])
        fire_times = fire_times[-1:]
    for fire in fire_times:
        if schedule.overlap == "skip" and (open_runs or firing.runs):
            firing.skipped += 1
            firing.error = None
            continue
        try:
            run = _run(tx, firing.row, schedule, fire, len(firing.runs))
        except (InvalidWorkflow, *_UNREADABLE) as error:
            firing.error = f"The fire of {fire:%Y-%m-%d %H:%M:%S} UTC started nothing: {error}"
            continue
        firing.runs.append((fire, run if tx.spans is None else tx.spans.rooted(run)))
        firing.error = None
        if schedule.overlap == "cancel_previous":
            firing.superseded = open_runs


def _run(tx: Transaction, row: DueSchedule, schedule: Schedule, fire: datetime, place: int) -> NewRun:
    key = fire_key(row.key, fire)
    identifier = _run_id(tx.now, key, place) if row.target.code is None else _id_of_code(key, fire)
    return store.run_of(row.target, schedule, fire, identifier, row.key, tx.vault, key=key)


def _id_of_code(key: str, fire: datetime) -> bytes:
    """Return the id of the code run of a fire. It is derived: older releases stored no key."""
    digest = hashlib.blake2b(key.encode(), digest_size=10).digest()
    return time_ordered_id(int(fire.timestamp() * 1000), digest)


def _run_id(now: datetime, key: str, place: int) -> bytes:
    """Return an id that sorts by creation time, then by place. A queue starts runs in this order."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return time_ordered_id(int(now.timestamp() * 1000), min(place, 0xFFF).to_bytes(2, "big") + digest)


def _write(tx: Transaction, cancels: Cancels, firings: Sequence[_Firing]) -> None:
    started = create_begun(tx, cancels.runs.dags, [run for firing in firings for _, run in firing.runs])
    superseded: list[bytes] = []
    advances = []
    for firing in firings:
        started_fires = [(fire, run.id) for fire, run in firing.runs if run.id in started]
        superseded += firing.superseded if started_fires else []  # a fire that already had its run cancels nothing
        last_fire, last_run = started_fires[-1] if started_fires else (None, None)
        advances.append(
            Advance(
                place=firing.row.place,
                workflow=firing.row.workflow,
                name=firing.row.name,
                next_fire=firing.next_fire,
                due_at=firing.due_at,
                last_fire=last_fire,
                last_run=last_run,
                fired=len(started_fires),
                skipped=firing.skipped,
                error=firing.error,
            )
        )
    store.advance(tx.connection, advances)
    if superseded:
        cancels.mark(tx, superseded)
        ask_to_cancel(tx, superseded, "its schedule starts the next one")


# -- backfills


def extend_backfills(tx: Transaction, limit: int) -> None:
    """Start more runs of open backfills, the oldest first.

    A backfill's lane enforces its concurrency. This creates just enough runs to keep the lane busy until the next tick,
    so that a backfill of a hundred thousand runs does not fill the table.
    """
    room = min(limit, _SLICE)
    for backfill in backfills.open_backfills(tx.connection, _MAX_BACKFILLS):
        number = min(room, backfill.concurrency + _SLICE - backfill.running)
        if number > 0:
            _extend(tx, backfill, number)
            room -= number


def _extend(tx: Transaction, backfill: OpenBackfill, room: int) -> None:
    """Start more runs of a backfill. End the backfill on an error, which would occur every time."""
    try:
        schedule = backfill.schedule
        fire_times = list(islice(fires(schedule, backfill.next_fire, backfill.end), room))
        following = next_fire(schedule, fire_times[-1]) if fire_times else None
        existing = _existing_fires(tx, backfill, fire_times)
        new = [
            _backfill_run(tx, backfill, schedule, fire, place)
            for place, fire in enumerate(fire_times)
            if fire not in existing
        ]
        with savepoint(tx.connection):
            started = create_runs(tx, new if tx.spans is None else [tx.spans.rooted(run) for run in new])
    except Exception as error:
        if affects_everything(error):
            raise
        log.error("backfill.failed backfill=%d error=%s", backfill.id, error_line(error))
        backfills.save(tx.connection, backfill.id, None, 0, 0, error_line(error))
        return
    next_time = following if following is not None and following < backfill.end else None
    backfills.save(tx.connection, backfill.id, next_time, len(fire_times), len(started), None)


def _existing_fires(tx: Transaction, backfill: OpenBackfill, fire_times: Sequence[datetime]) -> set[datetime]:
    """Return the fires that have a code run, by its id. All other runs are recognized by their keys."""
    if backfill.code is None or backfill.again:
        return set()
    fires = {_id_of_code(fire_key(key_of(backfill.workflow, backfill.name), fire), fire): fire for fire in fire_times}
    return {fires[run] for run in results.run_states(tx.connection, list(fires))}


def _backfill_run(tx: Transaction, backfill: OpenBackfill, schedule: Schedule, fire: datetime, place: int) -> NewRun:
    series = backfill.series
    one_by_one = msgspec.structs.replace(schedule, overlap="allow")  # its own limit replaces the overlap policy
    key = fire_key(series if backfill.again else key_of(backfill.workflow, backfill.name), fire)
    identifier = _run_id(tx.now, fire_key(series, fire), place)
    run = store.run_of(backfill.target, one_by_one, fire, identifier, series, tx.vault, key=key)
    if run.lane is not None:
        return run
    return run._replace(lane=f"schedule {series}", lane_limit=backfill.concurrency)
