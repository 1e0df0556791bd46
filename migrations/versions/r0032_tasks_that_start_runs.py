"""The task that a run was started by."""

from __future__ import annotations

from alembic import op

revision = "0032"
down_revision = "0031"


def upgrade() -> None:
    op.execute("ALTER TABLE orchestrator.runs ADD COLUMN parent_task uuid")
    op.execute("COMMENT ON COLUMN orchestrator.runs.parent_task IS 'the task that started it'")


def downgrade() -> None:
    op.execute("ALTER TABLE orchestrator.runs DROP COLUMN parent_task")
