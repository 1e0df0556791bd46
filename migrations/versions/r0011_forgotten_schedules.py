"""Which application's code declares a schedule, and since when it does so no more."""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"

_UPGRADE = """
ALTER TABLE orchestrator.schedules
    ADD COLUMN origin text,
    ADD COLUMN forgotten_at timestamptz;

COMMENT ON COLUMN orchestrator.schedules.origin IS 'the application whose code declares it; null if none does';
COMMENT ON COLUMN orchestrator.schedules.forgotten_at IS 'since when that code declares it no more';
"""

_DOWNGRADE = """
ALTER TABLE orchestrator.schedules DROP COLUMN origin, DROP COLUMN forgotten_at;
"""


def upgrade() -> None:
    op.execute(_UPGRADE)


def downgrade() -> None:
    op.execute(_DOWNGRADE)
