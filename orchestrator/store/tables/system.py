"""Requests to the leader, leadership, the fleet, keys and the audit log."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Identity, Integer, LargeBinary, Text, Uuid, text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from orchestrator.store.tables.columns import NOW, Time, count, flag, index, table

inbox = table(
    "inbox",
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("kind", Text, nullable=False),
    Column("target", Uuid, nullable=False),
    Column("created_at", Time, nullable=False, server_default=NOW),
    Column("body", JSONB),
    comment="what anyone but the leader wants changed; applied and deleted by the next tick",
)

leases = table(
    "leases",
    Column("shard", Integer, primary_key=True, autoincrement=False),
    Column("owner", Uuid, nullable=False, comment="one scheduler process"),
    Column("term", BigInteger, nullable=False),
    Column("expires_at", Time, nullable=False),
    Column("address", Text, nullable=False, comment="for people: host and process id of the owner"),
    Column("useful_at", Time, comment="when the leader last did all of its work"),
    Column("useful_term", BigInteger, comment="the term that useful_at is about; earlier releases say nothing"),
    Column("trouble", Text, comment="what keeps the leader from its work"),
    count("fence", "attempts that are claimed from now on have greater numbers"),
)

cursors = table(
    "cursors",
    Column("shard", Integer, primary_key=True, autoincrement=False),
    Column("generation", Text, nullable=False, comment="one life of the Redis data"),
    Column("position", Text, nullable=False, comment="the last event that was applied"),
    Column("server", Text, nullable=False, comment="the Redis server's run id"),
    storage={"fillfactor": 10},
)

throughput = table(
    "throughput",
    Column("bucket", Time, primary_key=True, comment="where ten seconds begin"),
    Column("queue", Text, primary_key=True),
    Column("term", BigInteger, primary_key=True, autoincrement=False, comment="of the leader that has counted"),
    *(
        Column(name, BigInteger, nullable=False)
        for name in ("success", "failed", "cancelled", "skipped", "dispatched", "retried", "lost")
    ),
    Column("waits", ARRAY(BigInteger), nullable=False, comment="how many waited how long, by bounds"),
    Column("runs", ARRAY(BigInteger), nullable=False, comment="how many ran how long, by bounds"),
)

services = table(
    "services",
    Column("id", Text, primary_key=True),
    Column("url", Text, nullable=False, comment="what stands before /exec/"),
    Column("services", ARRAY(Text), nullable=False, comment="what it offers"),
    Column("registered_at", Time, nullable=False, server_default=NOW),
    Column("seen_at", Time, nullable=False, server_default=NOW, comment="touched once an hour while it lives"),
    comment="who has registered services over HTTP; who lives, and how busy they are, stands in Redis",
)
index("services_by_time", services.c.seen_at)

api_keys = table(
    "api_keys",
    Column("id", Text, primary_key=True, comment="the part of the key that may be shown"),
    Column("name", Text, nullable=False),
    Column("hash", LargeBinary, nullable=False, comment="SHA-256 of the secret part"),
    Column("scope", Text, nullable=False, comment="read, enqueue, operate or admin"),
    Column("created_at", Time, nullable=False, server_default=NOW),
    Column("expires_at", Time),
    Column("revoked_at", Time),
    Column("queues", Text, comment="what the names of the queues that it is for begin with"),
    Column("workflows", Text, comment="what the names of the workflows that it is for begin with"),
    Column("tasks", Text, comment="what the names of the tasks that it may enqueue begin with, with commas between"),
    Column("quotas", JSONB, comment="its quotas, where they are not the defaults"),
)

sessions = table(
    "sessions",
    Column("hash", LargeBinary, primary_key=True, comment="SHA-256 of what the browser shows"),
    Column("key_id", Text, nullable=False, comment="the key of the log-in; the session is as good as it"),
    Column("created_at", Time, nullable=False, server_default=NOW),
    Column("expires_at", Time, nullable=False),
    comment="who has logged in to the dashboard",
)
index("sessions_by_end", sessions.c.expires_at)
index("sessions_of_key", sessions.c.key_id)

audit = table(
    "audit",
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("at", Time, nullable=False, server_default=NOW),
    Column("who", Text, nullable=False),
    Column("origin", Text, nullable=False, comment="an address, or host and process"),
    Column("act", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("detail", JSONB, nullable=False),
)
index("audit_by_time", audit.c.at)
index("audit_of_target", audit.c.target, audit.c.id)

workers = table(
    "workers",
    Column("id", Text, primary_key=True),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("queues", ARRAY(Text), nullable=False),
    Column("names", ARRAY(Text), nullable=False),
    Column("slots", Integer, nullable=False),
    Column("running", Integer, nullable=False),
    Column("state", Text, nullable=False, comment="live, draining or dead"),
    Column("started_at", Time, nullable=False),
    Column("seen_at", Time, nullable=False),
    Column(
        "still_since",
        Time,
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

worker_releases = table(
    "worker_releases",
    Column("worker", Text, primary_key=True),
    Column("release", Text, nullable=False, comment="the release of its application"),
    Column("started_at", Time, nullable=False),
    Column("until", Time, nullable=False, comment="when it is forgotten; attempts may be kept until then"),
    comment="which release workers ran, also those that have ended; attempts name the worker",
)
index("worker_releases_by_release", worker_releases.c.release, worker_releases.c.started_at)
index("worker_releases_by_end", worker_releases.c.until)

task_parameters = table(
    "task_parameters",
    Column("name", Text, primary_key=True, comment="a task or a workflow as code"),
    Column("parameters", JSONB, nullable=False),
    comment="what functions take, as workers last announced it",
)

drains = table(
    "drains",
    Column("parent", Uuid, primary_key=True, comment="one life of a worker's parent process"),
    Column("asked_at", Time, nullable=False, server_default=NOW),
    comment="workers that somebody wants to end",
)


# -- workflows, flows, and what starts runs of them

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
