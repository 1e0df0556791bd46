"""Workflows as code: histories, and what is open in a run."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"

_UPGRADE = """
ALTER TABLE orchestrator.runs
    ADD COLUMN code boolean NOT NULL DEFAULT false,
    ADD COLUMN last_event integer NOT NULL DEFAULT 0,
    ADD COLUMN shown integer NOT NULL DEFAULT 0,
    ADD COLUMN cached integer NOT NULL DEFAULT 0,
    ADD COLUMN stuck jsonb,
    ADD COLUMN child_id uuid,
    ADD COLUMN detached boolean NOT NULL DEFAULT false,
    ADD COLUMN closing boolean NOT NULL DEFAULT false;
CREATE INDEX runs_stuck ON orchestrator.runs (id) WHERE stuck IS NOT NULL AND ended_at IS NULL;
CREATE INDEX runs_closing ON orchestrator.runs (id) WHERE closing;

CREATE TABLE orchestrator.histories (
    run_id uuid NOT NULL,
    number integer NOT NULL,
    at timestamptz NOT NULL,
    kind text NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (run_id, number)
);
CREATE TABLE orchestrator.timers (
    run_id uuid NOT NULL,
    id uuid NOT NULL,
    due timestamptz NOT NULL,
    PRIMARY KEY (run_id, id)
);
CREATE INDEX timers_due ON orchestrator.timers (due);
CREATE TABLE orchestrator.promises (
    run_id uuid NOT NULL,
    id uuid NOT NULL,
    name text NOT NULL,
    ordinal integer NOT NULL,
    PRIMARY KEY (run_id, id)
);
CREATE TABLE orchestrator.answers (
    id uuid PRIMARY KEY,
    at timestamptz NOT NULL,
    result bytea,
    error jsonb
);
CREATE INDEX answers_by_time ON orchestrator.answers USING brin (at) WITH (autosummarize = on);
CREATE TABLE orchestrator.run_keys (
    key text PRIMARY KEY,
    run_id uuid NOT NULL
);
CREATE INDEX run_keys_of_run ON orchestrator.run_keys (run_id);

COMMENT ON COLUMN orchestrator.runs.code IS 'of a workflow as code: its own task has its id, and ends it';
COMMENT ON COLUMN orchestrator.runs.last_event IS 'the number of the newest event of its history';
COMMENT ON COLUMN orchestrator.runs.shown IS 'the newest event that its code has been shown';
COMMENT ON COLUMN orchestrator.runs.cached IS 'the attempt that left its code in the memory of a worker';
COMMENT ON COLUMN orchestrator.runs.stuck IS 'why its code cannot go on with this history';
COMMENT ON COLUMN orchestrator.runs.child_id IS 'the id under which its parent waits for it';
COMMENT ON COLUMN orchestrator.runs.detached IS 'goes on when its parent ends';
COMMENT ON COLUMN orchestrator.runs.closing IS 'has ended, and its open tasks are being cancelled';
COMMENT ON TABLE orchestrator.histories IS 'append-only: what happened in runs of workflows as code';
COMMENT ON COLUMN orchestrator.histories.kind IS 'for people; data says it all';
COMMENT ON TABLE orchestrator.timers IS 'what runs of workflows as code will be told by the clock';
COMMENT ON TABLE orchestrator.promises IS 'what runs of workflows as code wait for from outside';
COMMENT ON TABLE orchestrator.answers IS 'what came of queries, updates and promises, for who asked; kept for an hour';
COMMENT ON TABLE orchestrator.run_keys IS 'the newest run that was started under a chosen id';
"""


def upgrade() -> None:
    op.execute(_UPGRADE)


def downgrade() -> None:
    raise NotImplementedError("Histories cannot be put back into the older tables.")
