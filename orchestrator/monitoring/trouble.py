"""Current problems of the system, and what to do about each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from orchestrator.domain.tasks import obstacles
from orchestrator.monitoring.times import ago, counted, duration, present
from orchestrator.payloads.stores import free_bytes
from orchestrator.store.insights import Connections, Leader, LongTransaction, Overview, UnknownTasks, WorkerView
from orchestrator.store.shards import ShardView, mismatch
from orchestrator.terminal_safe import sentence, without_password
from orchestrator.transport.inspection import RedisHealth, RedisView

_MIN_FREE = 64_000_000
"""Free bytes below which a payload store counts as full: the size of the largest value over HTTP."""
_WARNING_SHARE = 0.9
"""The share of a limit from which on it is reported as nearly reached."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A problem that needs a person."""

    kind: str
    """A stable name for programs, e.g. `redis full`."""
    message: str
    """The problem, its consequences, and what to do."""
    about: str = ""
    """The queue or task concerned, if several may have the same problem."""


STOPPING = {
    "redis away": "Redis is away",
    "redis full": "Redis is full",
    "redis refuses writes": "Redis refuses writes",
    "no leader": "no scheduler leads",
    "leader in trouble": "the scheduler cannot work",
    "workers unheard": "the scheduler does not hear the workers",
}
"""Problems that stop everything, each with a short description."""
_CAUSES = ("redis away", "redis full", "redis refuses writes")
_EFFECTS = ("no leader", "leader in trouble", "workers unheard")
_BY_GRAVITY = (
    *(*_CAUSES, "connections run out", "no leader", "leader in trouble", "workers unheard"),
    *("scheduler stuck", "wrong shards"),
    *("payload store full", "foreign key", "redis evicts", "redis nearly full", "no worker", "worker stands still"),
    *("unknown task", "no data key", "no executor", "no database", "stuck runs", "paused queue"),
)
"""The order of importance. All other problems come last."""


def by_gravity(found: Iterable[Trouble]) -> list[Trouble]:
    """Return problems by importance. Leave out scheduler problems that an outage of Redis causes."""
    troubles = [*found]
    is_cause = any(trouble.kind in _CAUSES for trouble in troubles)
    remaining = [trouble for trouble in troubles if not (is_cause and trouble.kind in _EFFECTS)]
    ranks = {kind: rank for rank, kind in enumerate(_BY_GRAVITY)}
    return sorted(remaining, key=lambda trouble: ranks.get(trouble.kind, len(ranks)))


def of_the_system(overview: Overview, lease: float, complaint: str | None = None) -> Iterator[Trouble]:
    """Yield problems of our own processes: no leader, no worker for a queue, an unknown task."""
    yield from of_leaders(overview.leader, overview.shards, lease, complaint)
    for queue in overview.unserved_queues if _is_useful(overview.leader, lease) else ():
        yield Trouble(kind="no worker", about=queue, message=obstacles.no_worker(queue))
    for paused in overview.paused_queues:
        oldest = f", the oldest for {duration(paused.oldest)}" if paused.oldest is not None else ""
        message = obstacles.paused(paused.queue, f"; {paused.waiting:,} tasks wait in it{oldest}")
        yield Trouble(kind="paused queue", about=paused.queue, message=message)
    now = present()
    for unknown in overview.unknown_tasks:
        key = obstacles.key_of_hold(unknown.hold)
        if key is not None:
            message = obstacles.no_data_key(unknown.queue, _unknown(unknown, now), key)
            yield Trouble(kind="no data key", about=unknown.name, message=message)
            continue
        wants = obstacles.executor_of_hold(unknown.hold)
        if wants is not None:
            message = obstacles.no_executor(unknown.queue, _unknown(unknown, now), wants)
            yield Trouble(kind="no executor", about=unknown.name, message=message)
            continue
        is_known = unknown.handed_back and not unknown.runs
        describe = obstacles.no_database if is_known else obstacles.unknown_task
        kind = "no database" if is_known else "unknown task"
        yield Trouble(kind=kind, about=unknown.name, message=describe(unknown.queue, _unknown(unknown, now)))
    for worker in overview.still_workers:
        yield Trouble(
            kind="worker stands still",
            about=worker.id,
            message=f"Worker {worker.id} (process {worker.pid} on {worker.host}) {describe_stall(worker)}: a task "
            f"holds the interpreter (GIL), or the process was paused. It is replaced when one of its tasks times out "
            f"or is cancelled: orchestrator tasks cancel ID, or, for a run of a workflow as code, orchestrator runs "
            f"terminate ID",
        )
    if overview.stuck_runs:
        yield Trouble(
            kind="stuck runs",
            message=f"{counted(overview.stuck_runs, 'run')} cannot continue; the newest: "
            f"{sentence(overview.stuck_reason or 'the reason is unknown.')} Look at them: orchestrator runs list "
            f"--stuck",
        )
    for failing in overview.failing_schedules:
        yield Trouble(kind="failing schedule", message=f"Schedule {failing.key} starts nothing: {failing.error}")
    for stopped in overview.stopped_backfills:
        yield Trouble(
            kind="stopped backfill",
            about=str(stopped.id),
            message=f"Backfill {stopped.id} of schedule {stopped.key} stopped after {stopped.passed:,} of "
            f"{stopped.total:,} fires: {sentence(stopped.error)} Fix the cause and start the backfill again, which "
            f"fills the gaps, or give it up: orchestrator schedules cancel-backfill {stopped.id}",
        )
    for forgotten in overview.forgotten_schedules:
        yield Trouble(
            kind="forgotten schedule",
            message=f"Schedule {forgotten.key} is no longer in the code of {forgotten.origin}, but still fires. Delete "
            f"it: orchestrator schedules delete {forgotten.key}",
        )


def of_leaders(
    leader: Leader | None, shards: Sequence[ShardView], lease: float, complaint: str | None = None
) -> Iterator[Trouble]:
    """Yield shards without a leader, and leaders that do no work."""
    if leader is None:
        yield Trouble(kind="no leader", message=obstacles.NO_LEADER if complaint is None else obstacles.NONE_CAN_LEAD)
    elif not _is_useful(leader, lease):
        yield Trouble(kind="leader in trouble", message=_useless(leader.address, "", leader.idle, leader.trouble))
    for shard in shards[1:]:
        about = f"shard {shard.shard}"
        if shard.leader is None and (shard.is_open or not shard.is_closing):
            yield Trouble(kind="no leader", about=about, message=obstacles.no_leader(shard.shard))
        elif shard.leader is not None and shard.idle is not None and shard.idle > lease:
            message = _useless(shard.leader, f" {about}", shard.idle, shard.trouble)
            yield Trouble(kind="leader in trouble", about=about, message=message)


def _is_useful(leader: Leader | None, lease: float) -> bool:
    """Return whether a leader works. Without one, nobody observes the workers of queues."""
    return leader is not None and (leader.idle is None or leader.idle <= lease)


def of_shards(overview: Overview, shards: int) -> Iterator[Trouble]:
    """Yield a problem if this process is configured with another number of shards than the database has."""
    if message := mismatch(overview.shards, shards):
        yield Trouble(kind="wrong shards", message=message)


def _useless(address: str, shard: str, idle: float | None, reason: str | None) -> str:
    return (
        f"The scheduler {address} leads{shard}, but has done no work for {duration(idle)}: "
        f"{sentence(reason or 'it gives no reason.')} A healthy standby would have taken over; there is none. Fix the "
        f"cause, or start a scheduler elsewhere: orchestrator scheduler"
    )


def describe_stall(worker: WorkerView) -> str:
    """Describe how long a worker has been stuck, and with which tasks."""
    tasks = ", ".join(map(str, worker.holds)) or "no task"
    return f"has been unresponsive for {duration(worker.still)}, holds {tasks}"


def _unknown(unknown: UnknownTasks, now: datetime) -> str:
    """Describe which task or workflow is unknown, and what will happen."""
    end = ago(unknown.fails_at, now)
    if not unknown.runs:
        return f"{unknown.name!r}: {unknown.tasks:,} waiting{f', the first fails {end}' if end else ''}"
    what = f"workflow {unknown.name!r}: {unknown.runs:,} waiting"
    if not end:
        return what
    others = "" if unknown.begun == unknown.runs else "; runs that have not started fail then"
    begun = f", {unknown.begun:,} of them started: the first is stuck {end}, and resumes when a worker knows it again"
    return f"{what}, the first fails {end}" if not unknown.begun else f"{what}{begun}{others}"


def foreign_data(view: RedisView) -> Iterator[Trouble]:
    """Yield foreign data under our Redis keys, and quarantined messages."""
    for foreign in view.foreign_keys:
        yield Trouble(
            kind="foreign key",
            message=f"Redis key {foreign.key} holds a {foreign.found} instead of our {foreign.expected}, and every "
            f"operation that needs it fails. Find the program that wrote it, then: redis-cli DEL '{foreign.key}'",
        )
    if view.quarantined:
        yield Trouble(
            kind="set aside",
            message=f"{counted(view.quarantined, 'message')} could not be decoded or applied, or list tasks that "
            f"Postgres has lost. List them: orchestrator quarantine list",
        )


def of_redis(health: RedisHealth) -> Iterator[Trouble]:
    """Yield problems of Redis."""
    error = (health.error or "").removesuffix(".")
    meanwhile = "Enqueued tasks are kept and running tasks continue, but no task starts until Redis"
    if health.is_locked:
        yield Trouble(
            kind="redis away",
            message=f"Redis rejects the user or password in the setting redis_url, or the user lacks a permission ("
            f"{health.error}). {meanwhile} accepts them: correct the setting, or the user in Redis.",
        )
    elif not health.reachable:
        yield Trouble(
            kind="redis away", message=f"Redis cannot be reached ({error}). {meanwhile} is reachable again: start it."
        )
    elif health.error is not None and health.fullness >= 1:
        yield Trouble(
            kind="redis full",
            message=f"Redis is full: {_megabytes(health.used_memory)} of {_megabytes(health.max_memory)}. {meanwhile} "
            f"has room: raise maxmemory, or remove the data of other programs.",
        )
    elif health.error is not None:
        yield Trouble(
            kind="redis refuses writes",
            message=f"Redis refuses writes ({error}). {meanwhile} accepts them: see its log, and check its disk.",
        )
    elif health.fullness >= _WARNING_SHARE:
        yield Trouble(
            kind="redis nearly full",
            message=f"Redis uses {_megabytes(health.used_memory)} of {_megabytes(health.max_memory)}. When it is full, "
            f"no task starts: raise maxmemory.",
        )
    if health.complaint is not None:
        yield Trouble(kind="scheduler stuck", message=health.complaint)
    if health.max_memory and health.eviction != "noeviction":
        yield Trouble(
            kind="redis evicts",
            message=f"Redis has maxmemory-policy {health.eviction!r} and drops messages when it is full. "
            f"Set it: redis-cli CONFIG SET maxmemory-policy noeviction",
        )


def of_payload_store(url: str) -> Iterator[Trouble]:
    """Yield a problem if the payload store is a full folder on this machine."""
    free = free_bytes(url)
    if free is not None and free < _MIN_FREE:
        yield Trouble(
            kind="payload store full",
            message=f"The payload store {without_password(url)} has {_megabytes(free)} left. Large arguments are "
            f"refused, and tasks with large results wait until it has room: free some space.",
        )


def of_postgres(connections: Connections, transactions: Sequence[LongTransaction], dead_rows: int) -> Iterator[Trouble]:
    """Yield problems caused by other users of Postgres."""
    if connections.used >= _WARNING_SHARE * connections.limit:
        yield Trouble(
            kind="connections run out",
            message=f"Postgres has {connections.used} of {connections.limit} connections open. When none are left, "
            f"enqueues are refused: close some, or raise max_connections.",
        )
    for open_ in transactions:
        who = f"process {open_.pid}" if open_.pid is not None else "prepared transaction"
        undo = f"SELECT pg_terminate_backend({open_.pid})" if open_.pid is not None else "ROLLBACK PREPARED"
        what = f"{open_.application or 'unnamed'}, {open_.role}, {open_.state}"
        query = f"; its last statement: {open_.query}" if open_.query else ""
        yield Trouble(
            kind="long transaction",
            message=f"A transaction has been open for {duration(open_.age)} and holds back vacuum (dead rows among the "
            f"open tasks: {dead_rows:,}): {who} ({what}){query}. End it: {undo}",
        )


def _megabytes(count: int) -> str:
    return f"{count / 1_000_000:,.1f} MB"
