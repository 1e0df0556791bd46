"""Runs and their data: pending changes, histories of workflows as code, node visits of flows."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Identity,
    Integer,
    LargeBinary,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from orchestrator.domain.code.other_runs import WAIT
from orchestrator.domain.states import RunState
from orchestrator.store.tables.columns import NOW, Time, count, flag, index, one_of, table

runs = table(
    "runs",
    Column("id", Uuid, primary_key=True),
    Column("name", Text, nullable=False),
    Column("status", Text, nullable=False, server_default=text("'pending'")),
    flag("cancelling"),
    Column("total", Integer, nullable=False),
    Column("open", Integer, nullable=False),
    count("success"),
    count("failed"),
    count("cancelled"),
    count("skipped"),
    Column("created_at", Time, nullable=False, server_default=NOW),
    Column("started_at", Time),
    Column("ended_at", Time),
    Column("workflow", Text, comment="the definition that it is a run of"),
    Column("version", Integer),
    Column("params", JSONB),
    Column("state", LargeBinary, comment="what the planner remembers"),
    flag("expanding", "more tasks are to be created"),
    Column("parent_run", Uuid),
    Column("parent_step", Text),
    Column("parent_position", Integer),
    Column("output", LargeBinary, comment="what a child run gives to its parent"),
    Column("reason", Text, comment="why it did not succeed, where no task says so"),
    Column("deadline", Time),
    Column("timeout", Double, comment="seconds that it may take from when it begins"),
    count("depth", "how many runs stand above it that started each other"),
    Column("root", Uuid, comment="the first of these"),
    count("descendants", "how many runs have come of it"),
    Column("tags", ARRAY(Text), nullable=False, server_default=text("'{}'")),
    Column("key", Text, comment="idempotency key"),
    Column("lane", Text, comment="what it shares a limit of running runs with"),
    Column("lane_limit", Integer),
    flag("parked", "its lane is full"),
    Column("schedule", Text, comment="what started it: workflow/name, or workflow/name#backfill"),
    Column("fire_time", Time, comment="the time that it is for"),
    flag("code", "of a workflow as code: its own task has its id, and ends it"),
    count("last_event", "the number of the newest event of its history"),
    count("shown", "the newest event that its code has been shown"),
    count("cached", "the attempt that left its code in the memory of a worker"),
    Column("stuck", JSONB, comment="why it cannot go on"),
    Column("waiting", JSONB, comment="where its code waits: places, signals, updates"),
    Column("child_id", Uuid, comment="the id under which its parent waits for it"),
    flag("detached", "goes on when its parent ends"),
    flag("terminates", "ends without its code when its parent ends"),
    flag("closing", "has ended, and its open tasks are being cancelled"),
    Column("trace", Text, comment="the span that it came of, as a W3C traceparent; its own where it came of none"),
    flag("flow", "of a flow graph: its planner ends it"),
    Column("parent_task", Uuid, comment="the task that started it"),
    Column("headers", JSONB, comment="texts that its tasks and child runs have, too"),
    Column("attributes", JSONB, comment="what its code has set for lists to be filtered by: names and scalars"),
    Column("retried_at", Time, comment="when it last began again, because it was retried"),
    CheckConstraint(one_of(RunState), name="runs_have_a_known_status"),
    CheckConstraint("total = open + success + failed + cancelled + skipped", name="runs_counters_add_up"),
    CheckConstraint("open >= 0", name="runs_open_not_negative"),
    storage={"fillfactor": 80},
)
index("runs_pending", runs.c.id, where="status = 'pending' AND NOT parked")
index("runs_by_workflow_key", runs.c.key, runs.c.workflow, unique=True, where="key IS NOT NULL")
index("runs_expanding", runs.c.id, where="expanding")
index("runs_of_parent", runs.c.parent_run, where="parent_run IS NOT NULL")
index("runs_due", runs.c.deadline, where="deadline IS NOT NULL AND ended_at IS NULL")
index("runs_in_lane", runs.c.lane, runs.c.id, where="lane IS NOT NULL AND ended_at IS NULL")
index("runs_holding_lane", runs.c.lane, where="status = 'running' AND lane IS NOT NULL")
index("runs_waiting_below", runs.c.lane, where="status = 'pending' AND parked AND parent_run IS NOT NULL")
index("runs_of_workflow", runs.c.workflow, runs.c.id, where="workflow IS NOT NULL")
index("runs_by_tag", runs.c.tags, postgresql_using="gin", where="tags <> '{}'")
index(
    "runs_by_attributes",
    runs.c.attributes,
    postgresql_using="gin",
    postgresql_ops={"attributes": "jsonb_path_ops"},
    where="attributes IS NOT NULL",
)
index("runs_of_schedule", runs.c.schedule, runs.c.id, where="schedule IS NOT NULL AND ended_at IS NULL")
index(
    "runs_failed_of_schedule",
    runs.c.schedule,
    where="schedule IS NOT NULL AND status IN ('failed', 'cancelled')",
)
index("runs_by_end", runs.c.ended_at, where="ended_at IS NOT NULL")
index("runs_stuck", runs.c.id, where="stuck IS NOT NULL AND ended_at IS NULL")
# Only for lists: a lookup by id must not use this index while there are few runs.
index(
    "runs_open_of_code",
    runs.c.workflow,
    runs.c.version,
    where="code AND ended_at IS NULL AND workflow IS NOT NULL",
)
index("runs_closing", runs.c.id, where="closing")
index("runs_of_flows", runs.c.id, where="flow")
index("runs_open_of_flows", runs.c.workflow, runs.c.id, where="flow AND ended_at IS NULL")
index("runs_cancelling", runs.c.id, where="cancelling AND ended_at IS NULL")

pending_changes = table(
    "untold",
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("run_id", Uuid, nullable=False),
    Column("held", Boolean, nullable=False, comment="the run is stuck; else it is told in one of the next ticks"),
    Column("body", LargeBinary, nullable=False),
    comment="what happened to runs that could not be told in the same tick",
)
index("untold_of_run", pending_changes.c.run_id)
index("untold_by_turns", pending_changes.c.run_id, pending_changes.c.id, where="NOT held")

deletions = table(
    "deletions",
    Column("run_id", Uuid, primary_key=True),
    comment="ended runs that somebody has deleted: the next round of retention removes them with all that is theirs",
)

histories = table(
    "histories",
    Column("run_id", Uuid, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("at", Time, nullable=False),
    Column("kind", Text, nullable=False, comment="for people; data says it all"),
    Column("data", LargeBinary, nullable=False),
    comment="append-only: what happened in runs of workflows as code",
)

timers = table(
    "timers",
    Column("run_id", Uuid, primary_key=True),
    Column("id", Uuid, primary_key=True),
    Column("due", Time, nullable=False),
    comment="what runs of workflows as code will be told by the clock",
)
index("timers_due", timers.c.due)

promises = table(
    "promises",
    Column("run_id", Uuid, primary_key=True),
    Column("id", Uuid, primary_key=True),
    Column("name", Text, nullable=False),
    Column("ordinal", Integer, nullable=False),
    comment="what runs of workflows as code wait for from outside",
)
index("promises_of_runs", promises.c.name, where=f"name LIKE '{WAIT}%'")

resolutions = table(
    "resolutions",
    Column("run_id", Uuid, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("number", Integer, primary_key=True, comment="its place among those of a name; 0 says that one was settled"),
    Column("value", LargeBinary),
    Column("error", JSONB),
    comment="promises that were settled before the code waits for them, by name",
)

answers = table(
    "answers",
    Column("id", Uuid, primary_key=True),
    Column("at", Time, nullable=False),
    Column("result", LargeBinary),
    Column("error", JSONB),
    comment="what came of queries, updates and promises, for who asked; kept for an hour",
)
index("answers_by_time", answers.c.at, postgresql_using="brin", postgresql_with={"autosummarize": "on"})

run_keys = table(
    "run_keys",
    Column("key", Text, primary_key=True),
    Column("run_id", Uuid, nullable=False),
    comment="the newest run that was started under a chosen id",
)
index("run_keys_of_run", run_keys.c.run_id)

node_runs = table(
    "node_runs",
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
    Column("started_at", Time, nullable=False),
    Column("ended_at", Time, nullable=False),
    comment="append-only: visits of runs of flows to their nodes",
)
