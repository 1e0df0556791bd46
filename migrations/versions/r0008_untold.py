"""What happened to runs that are set aside; and what workflows wait for, beside their definitions."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"

_UPGRADE = """
CREATE TABLE orchestrator.untold (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run_id uuid NOT NULL,
    held boolean NOT NULL,
    body bytea NOT NULL
);
CREATE INDEX untold_of_run ON orchestrator.untold (run_id);
CREATE INDEX untold_next ON orchestrator.untold (id) WHERE NOT held;

ALTER TABLE orchestrator.workflows ADD COLUMN triggers jsonb;
UPDATE orchestrator.workflows SET triggers = coalesce(definition->'on', '[]');

COMMENT ON TABLE orchestrator.untold IS 'what happened to runs that could not be told in the same tick';
COMMENT ON COLUMN orchestrator.untold.held IS 'the run is stuck; else it is told in one of the next ticks';
COMMENT ON COLUMN orchestrator.workflows.triggers IS 'what starts runs of it, as the definition says';
COMMENT ON COLUMN orchestrator.runs.stuck IS 'why it cannot go on';
"""


def upgrade() -> None:
    op.execute(_UPGRADE)


def downgrade() -> None:
    raise NotImplementedError("What runs have not been told would be lost.")
