"""Workers that stand still are known, and attempts that were handed back after they had begun are kept."""

from __future__ import annotations

from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.execute(
        "ALTER TABLE orchestrator.workers ADD COLUMN still_since timestamptz,"
        " ADD COLUMN holds uuid[] NOT NULL DEFAULT '{}'"
    )
    op.execute(
        "COMMENT ON COLUMN orchestrator.workers.still_since IS"
        " 'since when its process does nothing, because the code of a task keeps it or somebody has stopped it'"
    )
    op.execute("COMMENT ON COLUMN orchestrator.workers.holds IS 'while it stands still: the first tasks that it holds'")
    op.execute(
        "COMMENT ON COLUMN orchestrator.attempts.outcome IS"
        " 'failed, lost, postponed or returned; the attempt that ended a task is in ended_tasks'"
    )


def downgrade() -> None:
    op.execute(
        "COMMENT ON COLUMN orchestrator.attempts.outcome IS"
        " 'failed, lost or postponed; the attempt that ended a task is in ended_tasks'"
    )
    op.execute("ALTER TABLE orchestrator.workers DROP COLUMN holds, DROP COLUMN still_since")
