"""What a queue is asked for: expiry, lanes for limits and fairness, unique keys, callbacks, exactly-once."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"

_UPGRADE = """
ALTER TABLE orchestrator.tasks
    ADD COLUMN lane text,
    ADD COLUMN expires_at timestamptz,
    ADD COLUMN unique_key text,
    ADD COLUMN callbacks jsonb,
    ADD COLUMN details bytea,
    ADD COLUMN completion bytea;
ALTER TABLE orchestrator.ended_tasks
    ADD COLUMN lane text,
    ADD COLUMN unique_key text,
    ADD COLUMN callbacks jsonb;

DROP INDEX orchestrator.tasks_ready;
CREATE INDEX tasks_ready ON orchestrator.tasks (queue, priority DESC, seq)
 WHERE status = 'pending' AND blockers = 0 AND wake_at IS NULL AND lane IS NULL;
CREATE INDEX tasks_in_lane ON orchestrator.tasks (queue, lane, priority DESC, seq)
 WHERE status = 'pending' AND blockers = 0 AND wake_at IS NULL AND lane IS NOT NULL;
CREATE INDEX tasks_expiring ON orchestrator.tasks (expires_at) WHERE expires_at IS NOT NULL AND status = 'pending';

-- Pruning takes the oldest rows first and new ones fill the gaps, so time and place part ways: no work for BRIN.
DROP INDEX orchestrator.ended_tasks_by_time;
CREATE INDEX ended_tasks_by_time ON orchestrator.ended_tasks (ended_at);
CREATE INDEX runs_by_end ON orchestrator.runs (ended_at) WHERE ended_at IS NOT NULL;

CREATE TABLE orchestrator.queues (
    name text PRIMARY KEY,
    paused boolean NOT NULL DEFAULT false,
    concurrency integer,
    rate double precision,
    burst integer,
    retention_success double precision,
    retention_failed double precision
);
CREATE TABLE orchestrator.buckets (
    name text PRIMARY KEY,
    due timestamptz NOT NULL
);
CREATE TABLE orchestrator.unique_keys (
    key text PRIMARY KEY,
    task_id uuid NOT NULL,
    scope text NOT NULL,
    until timestamptz,
    CONSTRAINT unique_keys_have_a_known_scope CHECK (scope IN ('pending', 'running', 'period'))
);
CREATE INDEX unique_keys_by_time ON orchestrator.unique_keys (until) WHERE until IS NOT NULL;

COMMENT ON COLUMN orchestrator.attempts.outcome IS
    'failed, lost or postponed; the attempt that ended a task is in ended_tasks';
COMMENT ON COLUMN orchestrator.tasks.lane IS 'task|key: what it shares limits and turns with; null for most';
COMMENT ON COLUMN orchestrator.tasks.expires_at IS 'fails if it has not started by then';
COMMENT ON COLUMN orchestrator.tasks.callbacks IS 'tasks to create when this one ends';
COMMENT ON COLUMN orchestrator.tasks.details IS 'what an attempt left for the next one';
COMMENT ON COLUMN orchestrator.tasks.completion IS 'result of an attempt that committed together with its writes';
COMMENT ON TABLE orchestrator.queues IS 'what people have set for a queue; a queue without a row has no limits';
COMMENT ON COLUMN orchestrator.queues.retention_success IS 'seconds; 0 = for ever; null = as the settings say';
COMMENT ON TABLE orchestrator.buckets IS 'rate limits that have been used lately, one time stamp each';
COMMENT ON COLUMN orchestrator.buckets.due IS 'when everything admitted so far would have been due at the even rate';
COMMENT ON TABLE orchestrator.unique_keys IS 'which task has a key, and until when';
COMMENT ON COLUMN orchestrator.unique_keys.scope IS 'when the key is free again: claimed, ended, or by time';
"""


def upgrade() -> None:
    op.execute(_UPGRADE)


def downgrade() -> None:
    raise NotImplementedError("Limits and keys cannot be put back into the older tables.")
