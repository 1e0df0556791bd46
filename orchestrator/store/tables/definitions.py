"""Workflows, flows, and what starts runs of them."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Identity, Integer, Text, Uuid, text
from sqlalchemy.dialects.postgresql import JSONB

from orchestrator.store.tables.columns import NOW, Time, count, flag, index, table

workflows = table(
    "workflows",
    Column("name", Text, primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("hash", Text, nullable=False),
    Column("definition", JSONB, nullable=False),
    Column("created_at", Time, nullable=False, server_default=NOW),
    Column("deleted_at", Time),
    Column("triggers", JSONB, comment="what starts runs of it, as the definition says"),
    comment="definitions, immutable under (name, version)",
)

flows = table(
    "flows",
    Column("name", Text, primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False, comment="0 says only that there is such a flow"),
    Column("hash", Text, nullable=False),
    Column("definition", JSONB, nullable=False),
    Column("published", Boolean, nullable=False, server_default=text("true")),
    Column("created_at", Time, nullable=False, server_default=NOW),
    Column("deleted_at", Time),
    Column("on_error", Text, nullable=False, server_default="default", comment="default or fail: what failed nodes do"),
    comment="flow graphs, immutable under (name, version)",
)

schedules = table(
    "schedules",
    Column("workflow", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("definition", JSONB, nullable=False),
    flag("declared", "it stands in the definition of its workflow"),
    Column("code", JSONB, comment="how runs of a workflow as code are started; null for one of steps"),
    flag("paused"),
    Column("next_fire", Time, comment="the fire to look at next; null when none will come"),
    Column("due_at", Time, comment="when to look: the next fire, and the jitter"),
    Column("last_fire", Time),
    Column("last_run", Uuid),
    count("fired", kind=BigInteger),
    count("skipped", "fires that came while a run was open", BigInteger),
    Column("error", Text, comment="why the last fire could not start a run"),
    Column("created_at", Time, nullable=False, server_default=NOW),
    Column("origin", Text, comment="the application whose code declares it; null if none does"),
    Column("forgotten_at", Time, comment="since when that code declares it no more"),
    flag("flow", "it starts runs of a flow graph"),
    Column(
        "flow_version", Integer, comment="of the flow, if that is not the newest one that is published when it fires"
    ),
    comment="when runs of workflows start by themselves",
)
index("schedules_due", schedules.c.due_at, where="due_at IS NOT NULL AND NOT paused")
index("schedules_failing", schedules.c.workflow, schedules.c.name, where="error IS NOT NULL")

backfills = table(
    "backfills",
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("workflow", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("definition", JSONB, nullable=False),
    Column("start_at", Time, nullable=False),
    Column("end_at", Time, nullable=False),
    Column("concurrency", Integer, nullable=False),
    flag("again", "start fires that have had their run, too"),
    Column("total", Integer, nullable=False),
    count("passed", "fires that have been looked at"),
    count("started"),
    Column("next_fire", Time, comment="the fire to start next; null when all have been"),
    Column("error", Text),
    Column("created_at", Time, nullable=False, server_default=NOW),
    flag("flow", "it starts runs of a flow graph"),
    Column(
        "flow_version", Integer, comment="of the flow, if that is not the newest one that is published when it fires"
    ),
    comment="fires of a schedule over a range of the past, started a few at a time",
)
index("backfills_open", backfills.c.id, where="next_fire IS NOT NULL")
