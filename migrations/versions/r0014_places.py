"""A run of a workflow as code says where in its code it waits."""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.execute("ALTER TABLE orchestrator.runs ADD COLUMN waiting jsonb")
    op.execute("COMMENT ON COLUMN orchestrator.runs.waiting IS 'where its code waits: places, signals, updates'")


def downgrade() -> None:
    op.execute("ALTER TABLE orchestrator.runs DROP COLUMN waiting")
