"""An index of the runs of flows that are open: who waits for a person is found among these alone."""

from __future__ import annotations

from alembic import op

revision = "0027"
down_revision = "0026"


def upgrade() -> None:
    op.execute("CREATE INDEX runs_open_of_flows ON orchestrator.runs (workflow, id) WHERE flow AND ended_at IS NULL")


def downgrade() -> None:
    op.execute("DROP INDEX orchestrator.runs_open_of_flows")
