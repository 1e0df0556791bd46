"""Child runs that wait for a limit are found among all that wait for it."""

from __future__ import annotations

from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.execute(
        "CREATE INDEX runs_waiting_below ON orchestrator.runs (lane)"
        " WHERE status = 'pending' AND parked AND parent_run IS NOT NULL"
    )


def downgrade() -> None:
    op.execute("DROP INDEX orchestrator.runs_waiting_below")
