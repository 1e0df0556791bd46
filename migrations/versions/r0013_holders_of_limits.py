"""Who holds the limit of a workflow is found without reading all who wait for it."""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.execute(
        "CREATE INDEX runs_holding_lane ON orchestrator.runs (lane) WHERE status = 'running' AND lane IS NOT NULL"
    )


def downgrade() -> None:
    op.execute("DROP INDEX orchestrator.runs_holding_lane")
