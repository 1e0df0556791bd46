"""Keys of runs belong to their workflows; a run's time begins when it does."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"

# The release before goes on working: it writes a deadline and no timeout, which the leader works out when the run
# begins, and its keys are unique under the new index, too.
_UPGRADE = """
ALTER TABLE orchestrator.runs ADD COLUMN timeout double precision;
COMMENT ON COLUMN orchestrator.runs.timeout IS 'seconds that it may take from when it begins';

CREATE UNIQUE INDEX runs_by_workflow_key ON orchestrator.runs (key, workflow) WHERE key IS NOT NULL;
DROP INDEX orchestrator.runs_by_key;

UPDATE orchestrator.runs SET lane = '|' || workflow || '|' || substr(lane, length(workflow) + 2)
 WHERE lane IS NOT NULL AND ended_at IS NULL AND strpos(workflow, '/') > 0 AND starts_with(lane, workflow || '/');
UPDATE orchestrator.run_keys k SET key = '|' || r.workflow || '|' || substr(k.key, length(r.workflow) + 2)
  FROM orchestrator.runs r
 WHERE r.id = k.run_id AND strpos(r.workflow, '/') > 0 AND starts_with(k.key, r.workflow || '/');
"""


def upgrade() -> None:
    op.execute(_UPGRADE)


def downgrade() -> None:
    raise NotImplementedError("Keys that two workflows share cannot be put back under one index.")
