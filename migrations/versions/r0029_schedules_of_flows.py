"""Schedules and backfills that start flows."""

from __future__ import annotations

from alembic import op

revision = "0029"
down_revision = "0028"


def upgrade() -> None:
    for table in ("schedules", "backfills"):
        op.execute(f"ALTER TABLE orchestrator.{table} ADD COLUMN flow boolean NOT NULL DEFAULT false")
        op.execute(f"ALTER TABLE orchestrator.{table} ADD COLUMN flow_version integer")
        op.execute(f"COMMENT ON COLUMN orchestrator.{table}.flow IS 'it starts runs of a flow graph'")
        op.execute(
            f"COMMENT ON COLUMN orchestrator.{table}.flow_version IS "
            f"'of the flow, if that is not the newest one that is published when it fires'"
        )


def downgrade() -> None:
    for table in ("schedules", "backfills"):
        op.execute(f"ALTER TABLE orchestrator.{table} DROP COLUMN flow_version, DROP COLUMN flow")
