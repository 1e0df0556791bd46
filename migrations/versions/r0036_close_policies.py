"""Child runs of code that are terminated, without running their code, when their parents end."""

from __future__ import annotations

from alembic import op

from orchestrator.store.compatibility import refuse_loss

revision = "0036"
down_revision = "0035"


def upgrade() -> None:
    op.execute("ALTER TABLE orchestrator.runs ADD COLUMN terminates boolean NOT NULL DEFAULT false")
    op.execute("COMMENT ON COLUMN orchestrator.runs.terminates IS 'ends without its code when its parent ends'")


def downgrade() -> None:
    refuse_loss(op.get_bind(), revision, "runs", "terminates")
    op.execute("ALTER TABLE orchestrator.runs DROP COLUMN terminates")
