"""The time of a run's last retry."""

from __future__ import annotations

from alembic import op

from orchestrator.store.compatibility import refuse_loss

revision = "0041"
down_revision = "0040"


def upgrade() -> None:
    op.execute("ALTER TABLE orchestrator.runs ADD COLUMN retried_at timestamptz")
    op.execute("COMMENT ON COLUMN orchestrator.runs.retried_at IS 'when it last began again, because it was retried'")


def downgrade() -> None:
    refuse_loss(op.get_bind(), revision, "runs", "retried_at IS NOT NULL")
    op.execute("ALTER TABLE orchestrator.runs DROP COLUMN retried_at")
