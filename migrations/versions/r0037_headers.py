"""The headers of runs, which their tasks inherit. Headers of a task are part of its options."""

from __future__ import annotations

from alembic import op

from orchestrator.store.compatibility import refuse_loss

revision = "0037"
down_revision = "0036"


def upgrade() -> None:
    op.execute("ALTER TABLE orchestrator.runs ADD COLUMN headers jsonb")
    op.execute("COMMENT ON COLUMN orchestrator.runs.headers IS 'texts that its tasks and child runs have, too'")


def downgrade() -> None:
    refuse_loss(op.get_bind(), revision, "runs", "headers IS NOT NULL")
    op.execute("ALTER TABLE orchestrator.runs DROP COLUMN headers")
