"""Workflow definitions, and runs of them."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"

_UPGRADE = """
CREATE TABLE orchestrator.workflows (
    name text NOT NULL,
    version integer NOT NULL,
    hash text NOT NULL,
    definition jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    deleted_at timestamptz,
    PRIMARY KEY (name, version)
);

ALTER TABLE orchestrator.tasks ADD COLUMN step text;
ALTER TABLE orchestrator.ended_tasks ADD COLUMN step text;
DROP INDEX orchestrator.tasks_of_run;
DROP INDEX orchestrator.ended_tasks_of_run;
CREATE INDEX tasks_of_run ON orchestrator.tasks (run_id, step, position) WHERE run_id IS NOT NULL;
CREATE INDEX ended_tasks_of_run ON orchestrator.ended_tasks (run_id, step, position) WHERE run_id IS NOT NULL;

ALTER TABLE orchestrator.runs
    ADD COLUMN workflow text,
    ADD COLUMN version integer,
    ADD COLUMN params jsonb,
    ADD COLUMN state bytea,
    ADD COLUMN expanding boolean NOT NULL DEFAULT false,
    ADD COLUMN parent_run uuid,
    ADD COLUMN parent_step text,
    ADD COLUMN parent_position integer,
    ADD COLUMN output bytea,
    ADD COLUMN reason text,
    ADD COLUMN deadline timestamptz,
    ADD COLUMN tags text[] NOT NULL DEFAULT '{}',
    ADD COLUMN key text,
    ADD COLUMN lane text,
    ADD COLUMN lane_limit integer,
    ADD COLUMN parked boolean NOT NULL DEFAULT false;
DROP INDEX orchestrator.runs_pending;
CREATE INDEX runs_pending ON orchestrator.runs (id) WHERE status = 'pending' AND NOT parked;
CREATE UNIQUE INDEX runs_by_key ON orchestrator.runs (key) WHERE key IS NOT NULL;
CREATE INDEX runs_expanding ON orchestrator.runs (id) WHERE expanding;
CREATE INDEX runs_of_parent ON orchestrator.runs (parent_run) WHERE parent_run IS NOT NULL;
CREATE INDEX runs_due ON orchestrator.runs (deadline) WHERE deadline IS NOT NULL AND ended_at IS NULL;
CREATE INDEX runs_in_lane ON orchestrator.runs (lane, id) WHERE lane IS NOT NULL AND ended_at IS NULL;
CREATE INDEX runs_of_workflow ON orchestrator.runs (workflow, id) WHERE workflow IS NOT NULL;
CREATE INDEX runs_by_tag ON orchestrator.runs USING gin (tags) WHERE tags <> '{}';

ALTER TABLE orchestrator.inbox ADD COLUMN body jsonb;

COMMENT ON COLUMN orchestrator.runs.workflow IS 'the definition that it is a run of';
COMMENT ON COLUMN orchestrator.runs.state IS 'what the planner remembers';
COMMENT ON COLUMN orchestrator.runs.expanding IS 'more tasks are to be created';
COMMENT ON COLUMN orchestrator.runs.output IS 'what a child run gives to its parent';
COMMENT ON COLUMN orchestrator.runs.reason IS 'why it did not succeed, where no task says so';
COMMENT ON COLUMN orchestrator.runs.key IS 'idempotency key';
COMMENT ON COLUMN orchestrator.runs.lane IS 'what it shares a limit of running runs with';
COMMENT ON COLUMN orchestrator.runs.parked IS 'its lane is full';
COMMENT ON COLUMN orchestrator.tasks.step IS 'which step of its workflow';
COMMENT ON TABLE orchestrator.workflows IS 'definitions, immutable under (name, version)';
"""


def upgrade() -> None:
    op.execute(_UPGRADE)


def downgrade() -> None:
    raise NotImplementedError("A workflow's history cannot be put back into the older tables.")
