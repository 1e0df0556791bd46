"""The task that a task was enqueued by, or follows."""

from __future__ import annotations

from alembic import op

revision = "0030"
down_revision = "0029"


def upgrade() -> None:
    op.execute("ALTER TABLE orchestrator.tasks ADD COLUMN parent_id uuid")
    op.execute("ALTER TABLE orchestrator.ended_tasks ADD COLUMN parent_id uuid")
    op.execute("COMMENT ON COLUMN orchestrator.tasks.parent_id IS 'the task that enqueued it, or that it follows'")


def downgrade() -> None:
    op.execute("ALTER TABLE orchestrator.ended_tasks DROP COLUMN parent_id")
    op.execute("ALTER TABLE orchestrator.tasks DROP COLUMN parent_id")
