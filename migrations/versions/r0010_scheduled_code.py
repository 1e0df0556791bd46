"""Schedules of workflows as code."""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"

_UPGRADE = """
ALTER TABLE orchestrator.schedules ADD COLUMN code jsonb;

COMMENT ON COLUMN orchestrator.schedules.code IS 'how runs of a workflow as code are started; null for one of steps';
"""


def upgrade() -> None:
    op.execute(_UPGRADE)


def downgrade() -> None:
    raise NotImplementedError("Schedules of workflows as code have no place in the older table.")
