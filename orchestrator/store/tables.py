"""The tables, as SQLAlchemy Core sees them. `migrations/` creates them; a test holds the two together.

Open tasks and ended ones live apart. `tasks` holds only what is still to be done, so it and its indexes stay
as small as the backlog; when a task ends, its row moves to `ended_tasks`, which is only ever appended to.
`docs/hot-tables.md` has the measurement that decided this.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from orchestrator.domain.states import ENDED_TASK_STATES, IN_FLIGHT_STATES, OPEN_TASK_STATES, RunState
from orchestrator.settings import DEFAULT_NAMESPACE

SCHEMA = DEFAULT_NAMESPACE
metadata = MetaData(schema=SCHEMA)

_now = text("now()")
_Time = DateTime(timezone=True)


KEPT = {"kept": True}
"""Marks a column of `tasks` that an ended task keeps as it is: `ended_tasks` has it, too."""


def _count(
    name: str, comment: str | None = None, kind: type[Integer] = Integer, info: dict[str, bool] | None = None
) -> Column[int]:
    """Return a number that begins with 0."""
    return Column(name, kind, nullable=False, server_default=text("0"), comment=comment, info=info)


def _flag(name: str, comment: str | None = None) -> Column[bool]:
    """Return what is false at first."""
    return Column(name, Boolean, nullable=False, server_default=text("false"), comment=comment)


def _one_of(states: object) -> str:
    return "status IN ({})".format(", ".join(f"'{state}'" for state in states))  # type: ignore[attr-defined]


tasks = Table(
    "tasks",
    metadata,
    Column("id", Uuid, primary_key=True, info=KEPT),
    Column(
        "seq",
        BigInteger,
        Identity(),
        nullable=False,
        comment="order of arrival; older first within a priority",
        info=KEPT,
    ),
    Column("name", Text, nullable=False, info=KEPT),
    Column("queue", Text, nullable=False, info=KEPT),
    _count("priority", kind=SmallInteger, info=KEPT),
    Column("status", Text, nullable=False, server_default=text("'pending'")),
    _count("blockers", "upstreams it still waits for"),
    Column("wake_at", _Time, comment="not before; null when ready or in flight"),
    Column("hold", Text, comment="why it is kept back: 'unknown' = no live worker knows it"),
    _count("attempt", "the fence; grows with every claim", info=KEPT),
    _count("failures", "what the retry policy charges"),
    _count("losses", "processes it took down with it"),
    _flag("alone", "runs in a process of its own"),
    Column("run_id", Uuid, info=KEPT),
    Column("position", Integer, comment="place among the tasks of its run", info=KEPT),
    Column("payload", LargeBinary, nullable=False, info=KEPT),
    Column("options", JSONB, comment="TaskOptions; null where all are defaults", info=KEPT),
    Column("worker", Text),
    Column("created_at", _Time, nullable=False, server_default=_now, info=KEPT),
    Column("dispatched_at", _Time),
    Column("started_at", _Time),
    Column("step", Text, comment="which step of its workflow", info=KEPT),
    Column("lane", Text, comment="task|key: what it shares limits and turns with; null for most", info=KEPT),
    Column("expires_at", _Time, comment="fails if it has not started by then"),
    Column("unique_key", Text, info=KEPT),
    Column("callbacks", JSONB, comment="tasks to create when this one ends", info=KEPT),
    Column("details", LargeBinary, comment="what an attempt left for the next one"),
    Column("completion", LargeBinary, comment="result of an attempt that committed together with its writes"),
    Column("trace", Text, comment="the span that it came of, as a W3C traceparent", info=KEPT),
    Column("ready_at", _Time, comment="of one that is traced: when its delay was over"),
    Column("parent_id", Uuid, comment="the task that enqueued it, or that it follows", info=KEPT),
    CheckConstraint(_one_of(OPEN_TASK_STATES), name="tasks_are_open"),
)

READY = "status = 'pending' AND blockers = 0 AND wake_at IS NULL"
DELAYED = "status = 'pending' AND blockers = 0 AND wake_at IS NOT NULL AND hold IS NULL"
NOBODY = "(hold = 'unknown' OR starts_with(hold, 'no data key: ') OR starts_with(hold, 'no executor: '))"
"""No live worker can run it: none knows it, or has the data key that opens it, or the executor that does it. It fails
when its time is up."""
READY_PLAIN = f"{READY} AND lane IS NULL"
READY_IN_LANE = f"{READY} AND lane IS NOT NULL"

Index("tasks_ready", tasks.c.queue, tasks.c.priority.desc(), tasks.c.seq, postgresql_where=text(READY_PLAIN))
Index(
    "tasks_in_lane",
    tasks.c.queue,
    tasks.c.lane,
    tasks.c.priority.desc(),
    tasks.c.seq,
    postgresql_where=text(READY_IN_LANE),
)
Index("tasks_expiring", tasks.c.expires_at, postgresql_where=text("expires_at IS NOT NULL AND status = 'pending'"))
Index("tasks_due", tasks.c.wake_at, postgresql_where=text("wake_at IS NOT NULL"))
Index("tasks_in_flight", tasks.c.id, postgresql_where=text(_one_of(IN_FLIGHT_STATES)))
Index("tasks_held", tasks.c.name, postgresql_where=text("hold IS NOT NULL"))
Index("tasks_of_run", tasks.c.run_id, tasks.c.step, tasks.c.position, postgresql_where=text("run_id IS NOT NULL"))

ended_tasks = Table(
    "ended_tasks",
    metadata,
    *(
        Column(column.name, column.type, primary_key=column.primary_key, nullable=column.nullable)
        for column in tasks.columns
        if column.info is KEPT
    ),
    Column("status", Text, nullable=False),
    Column("reason", Text, comment="why it did not succeed, in a word or two"),
    Column("failures", Integer, nullable=False),
    Column("losses", Integer, nullable=False),
    Column("result", LargeBinary),
    Column("error", JSONB, comment="kind, message, traceback"),
    Column("worker", Text),
    Column("started_at", _Time),
    Column("ended_at", _Time, nullable=False),
    CheckConstraint(_one_of(ENDED_TASK_STATES), name="ended_tasks_have_ended"),
)
Index("ended_tasks_not_success", ended_tasks.c.ended_at, postgresql_where=text("status <> 'success'"))
Index("ended_tasks_by_time", ended_tasks.c.ended_at)
Index(
    "ended_tasks_of_run",
    ended_tasks.c.run_id,
    ended_tasks.c.step,
    ended_tasks.c.position,
    postgresql_where=text("run_id IS NOT NULL"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("task_id", Uuid, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column(
        "outcome",
        Text,
        nullable=False,
        comment="failed, lost, postponed or returned; the attempt that ended a task is in ended_tasks",
    ),
    Column("error", JSONB),
    Column("worker", Text),
    Column("started_at", _Time),
    Column("ended_at", _Time, nullable=False),
    comment="append-only: attempts after which the task was tried again",
)

runs = Table(
    "runs",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("name", Text, nullable=False),
    Column("status", Text, nullable=False, server_default=text("'pending'")),
    _flag("cancelling"),
    Column("total", Integer, nullable=False),
    Column("open", Integer, nullable=False),
    _count("success"),
    _count("failed"),
    _count("cancelled"),
    _count("skipped"),
    Column("created_at", _Time, nullable=False, server_default=_now),
    Column("started_at", _Time),
    Column("ended_at", _Time),
    Column("workflow", Text, comment="the definition that it is a run of"),
    Column("version", Integer),
    Column("params", JSONB),
    Column("state", LargeBinary, comment="what the planner remembers"),
    _flag("expanding", "more tasks are to be created"),
    Column("parent_run", Uuid),
    Column("parent_step", Text),
    Column("parent_position", Integer),
    Column("output", LargeBinary, comment="what a child run gives to its parent"),
    Column("reason", Text, comment="why it did not succeed, where no task says so"),
    Column("deadline", _Time),
    Column("timeout", Double, comment="seconds that it may take from when it begins"),
    _count("depth", "how many runs stand above it that started each other"),
    Column("root", Uuid, comment="the first of these"),
    _count("descendants", "how many runs have come of it"),
    Column("tags", ARRAY(Text), nullable=False, server_default=text("'{}'")),
    Column("key", Text, comment="idempotency key"),
    Column("lane", Text, comment="what it shares a limit of running runs with"),
    Column("lane_limit", Integer),
    _flag("parked", "its lane is full"),
    Column("schedule", Text, comment="what started it: workflow/name, or workflow/name#backfill"),
    Column("fire_time", _Time, comment="the time that it is for"),
    _flag("code", "of a workflow as code: its own task has its id, and ends it"),
    _count("last_event", "the number of the newest event of its history"),
    _count("shown", "the newest event that its code has been shown"),
    _count("cached", "the attempt that left its code in the memory of a worker"),
    Column("stuck", JSONB, comment="why it cannot go on"),
    Column("waiting", JSONB, comment="where its code waits: places, signals, updates"),
    Column("child_id", Uuid, comment="the id under which its parent waits for it"),
    _flag("detached", "goes on when its parent ends"),
    _flag("terminates", "ends without its code when its parent ends"),
    _flag("closing", "has ended, and its open tasks are being cancelled"),
    Column("trace", Text, comment="the span that it came of, as a W3C traceparent; its own where it came of none"),
    _flag("flow", "of a flow graph: its planner ends it"),
    Column("parent_task", Uuid, comment="the task that started it"),
    CheckConstraint(_one_of(RunState), name="runs_have_a_known_status"),
    CheckConstraint("total = open + success + failed + cancelled + skipped", name="runs_counters_add_up"),
    CheckConstraint("open >= 0", name="runs_open_not_negative"),
)
Index("runs_pending", runs.c.id, postgresql_where=text("status = 'pending' AND NOT parked"))
Index("runs_by_workflow_key", runs.c.key, runs.c.workflow, unique=True, postgresql_where=text("key IS NOT NULL"))
Index("runs_expanding", runs.c.id, postgresql_where=text("expanding"))
Index("runs_of_parent", runs.c.parent_run, postgresql_where=text("parent_run IS NOT NULL"))
Index("runs_due", runs.c.deadline, postgresql_where=text("deadline IS NOT NULL AND ended_at IS NULL"))
Index("runs_in_lane", runs.c.lane, runs.c.id, postgresql_where=text("lane IS NOT NULL AND ended_at IS NULL"))
Index("runs_holding_lane", runs.c.lane, postgresql_where=text("status = 'running' AND lane IS NOT NULL"))
Index(
    "runs_waiting_below", runs.c.lane, postgresql_where=text("status = 'pending' AND parked AND parent_run IS NOT NULL")
)
Index("runs_of_workflow", runs.c.workflow, runs.c.id, postgresql_where=text("workflow IS NOT NULL"))
Index("runs_by_tag", runs.c.tags, postgresql_using="gin", postgresql_where=text("tags <> '{}'"))
Index(
    "runs_of_schedule", runs.c.schedule, runs.c.id, postgresql_where=text("schedule IS NOT NULL AND ended_at IS NULL")
)
Index(
    "runs_failed_of_schedule",
    runs.c.schedule,
    postgresql_where=text("schedule IS NOT NULL AND status IN ('failed', 'cancelled')"),
)
Index("runs_by_end", runs.c.ended_at, postgresql_where=text("ended_at IS NOT NULL"))
Index("runs_stuck", runs.c.id, postgresql_where=text("stuck IS NOT NULL AND ended_at IS NULL"))
# Only for those who list them: what looks a run up by its id must not be planned with this, while there are few.
Index(
    "runs_open_of_code",
    runs.c.workflow,
    runs.c.version,
    postgresql_where=text("code AND ended_at IS NULL AND workflow IS NOT NULL"),
)
Index("runs_closing", runs.c.id, postgresql_where=text("closing"))
Index("runs_of_flows", runs.c.id, postgresql_where=text("flow"))
Index("runs_open_of_flows", runs.c.workflow, runs.c.id, postgresql_where=text("flow AND ended_at IS NULL"))
Index("runs_cancelling", runs.c.id, postgresql_where=text("cancelling AND ended_at IS NULL"))

pending_changes = Table(
    "untold",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("run_id", Uuid, nullable=False),
    Column("held", Boolean, nullable=False, comment="the run is stuck; else it is told in one of the next ticks"),
    Column("body", LargeBinary, nullable=False),
    comment="what happened to runs that could not be told in the same tick",
)
Index("untold_of_run", pending_changes.c.run_id)
Index("untold_by_turns", pending_changes.c.run_id, pending_changes.c.id, postgresql_where=text("NOT held"))

histories = Table(
    "histories",
    metadata,
    Column("run_id", Uuid, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("at", _Time, nullable=False),
    Column("kind", Text, nullable=False, comment="for people; data says it all"),
    Column("data", LargeBinary, nullable=False),
    comment="append-only: what happened in runs of workflows as code",
)

timers = Table(
    "timers",
    metadata,
    Column("run_id", Uuid, primary_key=True),
    Column("id", Uuid, primary_key=True),
    Column("due", _Time, nullable=False),
    comment="what runs of workflows as code will be told by the clock",
)
Index("timers_due", timers.c.due)

promises = Table(
    "promises",
    metadata,
    Column("run_id", Uuid, primary_key=True),
    Column("id", Uuid, primary_key=True),
    Column("name", Text, nullable=False),
    Column("ordinal", Integer, nullable=False),
    comment="what runs of workflows as code wait for from outside",
)

resolutions = Table(
    "resolutions",
    metadata,
    Column("run_id", Uuid, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("number", Integer, primary_key=True, comment="its place among those of a name; 0 says that one was settled"),
    Column("value", LargeBinary),
    Column("error", JSONB),
    comment="promises that were settled before the code waits for them, by name",
)

answers = Table(
    "answers",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("at", _Time, nullable=False),
    Column("result", LargeBinary),
    Column("error", JSONB),
    comment="what came of queries, updates and promises, for who asked; kept for an hour",
)
Index("answers_by_time", answers.c.at, postgresql_using="brin", postgresql_with={"autosummarize": "on"})

run_keys = Table(
    "run_keys",
    metadata,
    Column("key", Text, primary_key=True),
    Column("run_id", Uuid, nullable=False),
    comment="the newest run that was started under a chosen id",
)
Index("run_keys_of_run", run_keys.c.run_id)

workflows = Table(
    "workflows",
    metadata,
    Column("name", Text, primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("hash", Text, nullable=False),
    Column("definition", JSONB, nullable=False),
    Column("created_at", _Time, nullable=False, server_default=_now),
    Column("deleted_at", _Time),
    Column("triggers", JSONB, comment="what starts runs of it, as the definition says"),
    comment="definitions, immutable under (name, version)",
)

flows = Table(
    "flows",
    metadata,
    Column("name", Text, primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False, comment="0 says only that there is such a flow"),
    Column("hash", Text, nullable=False),
    Column("definition", JSONB, nullable=False),
    Column("published", Boolean, nullable=False, server_default=text("true")),
    Column("created_at", _Time, nullable=False, server_default=_now),
    Column("deleted_at", _Time),
    Column("on_error", Text, nullable=False, server_default="default", comment="default or fail: what failed nodes do"),
    comment="flow graphs, immutable under (name, version)",
)

node_runs = Table(
    "node_runs",
    metadata,
    Column("run_id", Uuid, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("node", Text, nullable=False, comment="its key, behind those of the nodes above it"),
    Column("kind", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("action", Text, nullable=False),
    Column("error", Text),
    Column("input", LargeBinary, comment="null where its tasks have it"),
    Column("output", LargeBinary),
    Column("first_call", Integer, nullable=False, comment="the number from which the ids of its tasks derive"),
    Column("calls", Integer, nullable=False, comment="how many tasks it had"),
    Column("started_at", _Time, nullable=False),
    Column("ended_at", _Time, nullable=False),
    comment="append-only: visits of runs of flows to their nodes",
)

schedules = Table(
    "schedules",
    metadata,
    Column("workflow", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("definition", JSONB, nullable=False),
    _flag("declared", "it stands in the definition of its workflow"),
    Column("code", JSONB, comment="how runs of a workflow as code are started; null for one of steps"),
    _flag("paused"),
    Column("next_fire", _Time, comment="the fire to look at next; null when none will come"),
    Column("due_at", _Time, comment="when to look: the next fire, and the jitter"),
    Column("last_fire", _Time),
    Column("last_run", Uuid),
    _count("fired", kind=BigInteger),
    _count("skipped", "fires that came while a run was open", BigInteger),
    Column("error", Text, comment="why the last fire could not start a run"),
    Column("created_at", _Time, nullable=False, server_default=_now),
    Column("origin", Text, comment="the application whose code declares it; null if none does"),
    Column("forgotten_at", _Time, comment="since when that code declares it no more"),
    _flag("flow", "it starts runs of a flow graph"),
    Column(
        "flow_version", Integer, comment="of the flow, if that is not the newest one that is published when it fires"
    ),
    comment="when runs of workflows start by themselves",
)
Index("schedules_due", schedules.c.due_at, postgresql_where=text("due_at IS NOT NULL AND NOT paused"))
Index("schedules_failing", schedules.c.workflow, schedules.c.name, postgresql_where=text("error IS NOT NULL"))

backfills = Table(
    "backfills",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("workflow", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("definition", JSONB, nullable=False),
    Column("start_at", _Time, nullable=False),
    Column("end_at", _Time, nullable=False),
    Column("concurrency", Integer, nullable=False),
    _flag("again", "start fires that have had their run, too"),
    Column("total", Integer, nullable=False),
    _count("passed", "fires that have been looked at"),
    _count("started"),
    Column("next_fire", _Time, comment="the fire to start next; null when all have been"),
    Column("error", Text),
    Column("created_at", _Time, nullable=False, server_default=_now),
    _flag("flow", "it starts runs of a flow graph"),
    Column(
        "flow_version", Integer, comment="of the flow, if that is not the newest one that is published when it fires"
    ),
    comment="fires of a schedule over a range of the past, started a few at a time",
)
Index("backfills_open", backfills.c.id, postgresql_where=text("next_fire IS NOT NULL"))

inbox = Table(
    "inbox",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("kind", Text, nullable=False),
    Column("target", Uuid, nullable=False),
    Column("created_at", _Time, nullable=False, server_default=_now),
    Column("body", JSONB),
    comment="what anyone but the leader wants changed; applied and deleted by the next tick",
)

queues = Table(
    "queues",
    metadata,
    Column("name", Text, primary_key=True),
    _flag("paused"),
    Column("concurrency", Integer),
    Column("rate", Double),
    Column("burst", Integer),
    Column("retention_success", Double, comment="seconds; 0 = for ever; null = as the settings say"),
    Column("retention_failed", Double),
    comment="what people have set for a queue; a queue without a row has no limits",
)

buckets = Table(
    "buckets",
    metadata,
    Column("name", Text, primary_key=True),
    Column(
        "due", _Time, nullable=False, comment="when everything admitted so far would have been due at the even rate"
    ),
    comment="rate limits that have been used lately, one time stamp each",
)

unique_keys = Table(
    "unique_keys",
    metadata,
    Column("key", Text, primary_key=True),
    Column("task_id", Uuid, nullable=False),
    Column("scope", Text, nullable=False, comment="when the key is free again: claimed, ended, or by time"),
    Column("until", _Time),
    CheckConstraint("scope IN ('pending', 'running', 'period')", name="unique_keys_have_a_known_scope"),
    comment="which task has a key, and until when",
)
Index("unique_keys_by_time", unique_keys.c.until, postgresql_where=text("until IS NOT NULL"))

leases = Table(
    "leases",
    metadata,
    Column("shard", Integer, primary_key=True, autoincrement=False),
    Column("owner", Uuid, nullable=False, comment="one scheduler process"),
    Column("term", BigInteger, nullable=False),
    Column("expires_at", _Time, nullable=False),
    Column("address", Text, nullable=False, comment="for people: host and process id of the owner"),
    Column("useful_at", _Time, comment="when the leader last did all of its work"),
    Column("useful_term", BigInteger, comment="the term that useful_at is about; earlier releases say nothing"),
    Column("trouble", Text, comment="what keeps the leader from its work"),
    _count("fence", "attempts that are claimed from now on have greater numbers"),
)

cursors = Table(
    "cursors",
    metadata,
    Column("shard", Integer, primary_key=True, autoincrement=False),
    Column("generation", Text, nullable=False, comment="one life of the Redis data"),
    Column("position", Text, nullable=False, comment="the last event that was applied"),
    Column("server", Text, nullable=False, comment="the Redis server's run id"),
)

throughput = Table(
    "throughput",
    metadata,
    Column("bucket", _Time, primary_key=True, comment="where ten seconds begin"),
    Column("queue", Text, primary_key=True),
    Column("term", BigInteger, primary_key=True, autoincrement=False, comment="of the leader that has counted"),
    *(
        Column(name, BigInteger, nullable=False)
        for name in ("success", "failed", "cancelled", "skipped", "dispatched", "retried", "lost")
    ),
    Column("waits", ARRAY(BigInteger), nullable=False, comment="how many waited how long, by bounds"),
    Column("runs", ARRAY(BigInteger), nullable=False, comment="how many ran how long, by bounds"),
)

services = Table(
    "services",
    metadata,
    Column("id", Text, primary_key=True),
    Column("url", Text, nullable=False, comment="what stands before /exec/"),
    Column("services", ARRAY(Text), nullable=False, comment="what it offers"),
    Column("registered_at", _Time, nullable=False, server_default=_now),
    Column("seen_at", _Time, nullable=False, server_default=_now, comment="touched once an hour while it lives"),
    comment="who has registered services over HTTP; who lives, and how busy they are, stands in Redis",
)
Index("services_by_time", services.c.seen_at)

payload_keeps = Table(
    "payload_keeps",
    metadata,
    Column("owner", Uuid, primary_key=True, comment="the task or run with which payloads go"),
    Column("keeper", Uuid, primary_key=True, comment="another one that names some of them"),
)
Index("payload_keeps_of_keeper", payload_keeps.c.keeper)

task_logs = Table(
    "task_logs",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("task_id", Uuid, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("part", Integer, nullable=False, comment="counts the chunks of an attempt, from 0"),
    Column("run_id", Uuid),
    Column("step", Text, nullable=False, comment="the step that the task is of, or its name"),
    Column("stored_at", _Time, nullable=False, server_default=_now),
    Column("lines", LargeBinary, nullable=False, comment="encoded lines, whose texts may be sealed"),
    comment="what tasks said; only appended to, and trimmed",
)
Index("task_logs_by_task", task_logs.c.task_id, task_logs.c.attempt, task_logs.c.part, unique=True)
Index("task_logs_by_run", task_logs.c.run_id, task_logs.c.id, postgresql_where=task_logs.c.run_id.is_not(None))

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Text, primary_key=True, comment="the part of the key that may be shown"),
    Column("name", Text, nullable=False),
    Column("hash", LargeBinary, nullable=False, comment="SHA-256 of the secret part"),
    Column("scope", Text, nullable=False, comment="read, enqueue, operate or admin"),
    Column("created_at", _Time, nullable=False, server_default=_now),
    Column("expires_at", _Time),
    Column("revoked_at", _Time),
    Column("queues", Text, comment="what the names of the queues that it is for begin with"),
    Column("workflows", Text, comment="what the names of the workflows that it is for begin with"),
    Column("tasks", Text, comment="what the names of the tasks that it may enqueue begin with, with commas between"),
    Column("quotas", JSONB, comment="its quotas, where they are not the defaults"),
)

sessions = Table(
    "sessions",
    metadata,
    Column("hash", LargeBinary, primary_key=True, comment="SHA-256 of what the browser shows"),
    Column("key_id", Text, nullable=False, comment="the key of the log-in; the session is as good as it"),
    Column("created_at", _Time, nullable=False, server_default=_now),
    Column("expires_at", _Time, nullable=False),
    comment="who has logged in to the dashboard",
)
Index("sessions_by_end", sessions.c.expires_at)
Index("sessions_of_key", sessions.c.key_id)

audit = Table(
    "audit",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("at", _Time, nullable=False, server_default=_now),
    Column("who", Text, nullable=False),
    Column("origin", Text, nullable=False, comment="an address, or host and process"),
    Column("act", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("detail", JSONB, nullable=False),
)
Index("audit_by_time", audit.c.at)
Index("audit_of_target", audit.c.target, audit.c.id)

workers = Table(
    "workers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("queues", ARRAY(Text), nullable=False),
    Column("names", ARRAY(Text), nullable=False),
    Column("slots", Integer, nullable=False),
    Column("running", Integer, nullable=False),
    Column("state", Text, nullable=False, comment="live, draining or dead"),
    Column("started_at", _Time, nullable=False),
    Column("seen_at", _Time, nullable=False),
    Column(
        "still_since",
        _Time,
        comment="since when its process does nothing, because the code of a task keeps it or somebody has stopped it",
    ),
    Column(
        "holds",
        ARRAY(Uuid),
        nullable=False,
        server_default=text("'{}'"),
        comment="while it stands still: the first tasks that it holds",
    ),
    Column("parent", Uuid, comment="one life of its parent process, by which it is told to drain"),
    Column("memory", BigInteger, comment="bytes that it has in RAM"),
    Column("parent_memory", BigInteger, comment="bytes that its parent process has in RAM"),
    comment="a mirror of the fleet for people to look at; the truth is in the heartbeats",
)

drains = Table(
    "drains",
    metadata,
    Column("parent", Uuid, primary_key=True, comment="one life of a worker's parent process"),
    Column("asked_at", _Time, nullable=False, server_default=_now),
    comment="workers that somebody wants to end",
)
