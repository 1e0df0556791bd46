"""Open and ended tasks, in separate tables.

`tasks` holds only open tasks, so the table and its indexes stay as small as the backlog. When a task ends, its row
moves to `ended_tasks`, which is append-only. `docs/hot-tables.md` has the measurements behind this decision.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    Identity,
    Integer,
    LargeBinary,
    SmallInteger,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from orchestrator.domain.states import ENDED_TASK_STATES, IN_FLIGHT_STATES, OPEN_TASK_STATES
from orchestrator.store.tables.columns import KEPT, NOW, Time, count, flag, index, one_of, table

tasks = table(
    "tasks",
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
    count("priority", kind=SmallInteger, info=KEPT),
    Column("status", Text, nullable=False, server_default=text("'pending'")),
    count("blockers", "upstreams it still waits for"),
    Column("wake_at", Time, comment="not before; null when ready or in flight"),
    Column("hold", Text, comment="why it is kept back: 'unknown' = no live worker knows it"),
    count("attempt", "the fence; grows with every claim", info=KEPT),
    count("failures", "what the retry policy charges"),
    count("losses", "processes it took down with it"),
    flag("alone", "runs in a process of its own"),
    Column("run_id", Uuid, info=KEPT),
    Column("position", Integer, comment="place among the tasks of its run", info=KEPT),
    Column("payload", LargeBinary, nullable=False, info=KEPT),
    Column("options", JSONB, comment="TaskOptions; null where all are defaults", info=KEPT),
    Column("worker", Text),
    Column("created_at", Time, nullable=False, server_default=NOW, info=KEPT),
    Column("dispatched_at", Time),
    Column("started_at", Time),
    Column("step", Text, comment="which step of its workflow", info=KEPT),
    Column("lane", Text, comment="task|key: what it shares limits and turns with; null for most", info=KEPT),
    Column("expires_at", Time, comment="fails if it has not started by then"),
    Column("unique_key", Text, info=KEPT),
    Column("callbacks", JSONB, comment="tasks to create when this one ends", info=KEPT),
    Column("details", LargeBinary, comment="what an attempt left for the next one"),
    Column("completion", LargeBinary, comment="result of an attempt that committed together with its writes"),
    Column("trace", Text, comment="the span that it came of, as a W3C traceparent", info=KEPT),
    Column("ready_at", Time, comment="of one that is traced: when its delay was over"),
    Column("parent_id", Uuid, comment="the task that enqueued it, or that it follows", info=KEPT),
    CheckConstraint(one_of(OPEN_TASK_STATES), name="tasks_are_open"),
    storage={  # the table is small and changes fast: vacuum by the number of dead rows, not by size
        "autovacuum_vacuum_scale_factor": 0.0,
        "autovacuum_vacuum_threshold": 10_000,
        "autovacuum_vacuum_insert_scale_factor": 0.0,
        "autovacuum_vacuum_insert_threshold": 100_000,
        "autovacuum_analyze_scale_factor": 0.0,
        "autovacuum_analyze_threshold": 50_000,
        "autovacuum_vacuum_cost_delay": 0,
    },
)

READY = "status = 'pending' AND blockers = 0 AND wake_at IS NULL"
DELAYED = "status = 'pending' AND blockers = 0 AND wake_at IS NOT NULL AND hold IS NULL"
NOBODY = "(hold = 'unknown' OR starts_with(hold, 'no data key: ') OR starts_with(hold, 'no executor: '))"
"""No live worker can run the task: none has its name, its data key or its executor. It fails after a timeout."""
PARKED = "(status = 'pending' AND blockers > 0 AND id IS NOT DISTINCT FROM run_id)"
"""A turn task whose run of code waits for an event, maybe for days, and not for a worker."""
READY_PLAIN = f"{READY} AND lane IS NULL"
READY_IN_LANE = f"{READY} AND lane IS NOT NULL"

index("tasks_ready", tasks.c.queue, tasks.c.priority.desc(), tasks.c.seq, where=READY_PLAIN)
index(
    "tasks_in_lane",
    tasks.c.queue,
    tasks.c.lane,
    tasks.c.priority.desc(),
    tasks.c.seq,
    where=READY_IN_LANE,
)
index("tasks_expiring", tasks.c.expires_at, where="expires_at IS NOT NULL AND status = 'pending'")
index("tasks_due", tasks.c.wake_at, where="wake_at IS NOT NULL")
index("tasks_in_flight", tasks.c.id, where=one_of(IN_FLIGHT_STATES))
index("tasks_held", tasks.c.name, where="hold IS NOT NULL")
index("tasks_of_run", tasks.c.run_id, tasks.c.step, tasks.c.position, where="run_id IS NOT NULL")

ended_tasks = table(
    "ended_tasks",
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
    Column("started_at", Time),
    Column("ended_at", Time, nullable=False),
    CheckConstraint(one_of(ENDED_TASK_STATES), name="ended_tasks_have_ended"),
)
index("ended_tasks_not_success", ended_tasks.c.ended_at, where="status <> 'success'")
index("ended_tasks_by_time", ended_tasks.c.ended_at)
index(
    "ended_tasks_of_run",
    ended_tasks.c.run_id,
    ended_tasks.c.step,
    ended_tasks.c.position,
    where="run_id IS NOT NULL",
)

attempts = table(
    "attempts",
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
    Column("started_at", Time),
    Column("ended_at", Time, nullable=False),
    comment="append-only: attempts after which the task was tried again",
)

queues = table(
    "queues",
    Column("name", Text, primary_key=True),
    flag("paused"),
    Column("concurrency", Integer),
    Column("rate", Double),
    Column("burst", Integer),
    Column("retention_success", Double, comment="seconds; 0 = for ever; null = as the settings say"),
    Column("retention_failed", Double),
    comment="what people have set for a queue; a queue without a row has no limits",
)

buckets = table(
    "buckets",
    Column("name", Text, primary_key=True),
    Column("due", Time, nullable=False, comment="when everything admitted so far would have been due at the even rate"),
    comment="rate limits that have been used lately, one time stamp each",
)

unique_keys = table(
    "unique_keys",
    Column("key", Text, primary_key=True),
    Column("task_id", Uuid, nullable=False),
    Column("scope", Text, nullable=False, comment="when the key is free again: claimed, ended, or by time"),
    Column("until", Time),
    CheckConstraint("scope IN ('pending', 'running', 'period')", name="unique_keys_have_a_known_scope"),
    comment="which task has a key, and until when",
)
index("unique_keys_by_time", unique_keys.c.until, where="until IS NOT NULL")

payload_keeps = table(
    "payload_keeps",
    Column("owner", Uuid, primary_key=True, comment="the task or run with which payloads go"),
    Column("keeper", Uuid, primary_key=True, comment="another one that names some of them"),
)
index("payload_keeps_of_keeper", payload_keeps.c.keeper)

task_logs = table(
    "task_logs",
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("task_id", Uuid, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("part", Integer, nullable=False, comment="counts the chunks of an attempt, from 0"),
    Column("run_id", Uuid),
    Column("step", Text, nullable=False, comment="the step that the task is of, or its name"),
    Column("stored_at", Time, nullable=False, server_default=NOW),
    Column("lines", LargeBinary, nullable=False, comment="encoded lines, whose texts may be sealed"),
    comment="what tasks said; only appended to, and trimmed",
)
index("task_logs_by_task", task_logs.c.task_id, task_logs.c.attempt, task_logs.c.part, unique=True)
index("task_logs_by_run", task_logs.c.run_id, task_logs.c.id, where="run_id IS NOT NULL")
