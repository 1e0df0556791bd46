"""An index of the runs of schedules that did not succeed: a backfill counts its own, however many runs came since."""

from __future__ import annotations

from alembic import op

revision = "0033"
down_revision = "0032"


def upgrade() -> None:
    op.execute(
        """
        CREATE INDEX runs_failed_of_schedule ON orchestrator.runs (schedule)
         WHERE schedule IS NOT NULL AND status IN ('failed', 'cancelled')
        """
    )


def downgrade() -> None:
    op.execute("DROP INDEX orchestrator.runs_failed_of_schedule")
