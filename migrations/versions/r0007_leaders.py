"""What a leader has been able to do, and from which number on it numbers attempts."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"

_UPGRADE = """
ALTER TABLE orchestrator.leases
    ADD COLUMN useful_at timestamptz,
    ADD COLUMN useful_term bigint,
    ADD COLUMN trouble text,
    ADD COLUMN fence integer NOT NULL DEFAULT 0;

COMMENT ON COLUMN orchestrator.leases.useful_at IS 'when the leader last did all of its work';
COMMENT ON COLUMN orchestrator.leases.useful_term IS 'the term that useful_at is about; earlier releases say nothing';
COMMENT ON COLUMN orchestrator.leases.trouble IS 'what keeps the leader from its work';
COMMENT ON COLUMN orchestrator.leases.fence IS 'attempts that are claimed from now on have greater numbers';
"""

_DOWNGRADE = """
ALTER TABLE orchestrator.leases
    DROP COLUMN useful_at, DROP COLUMN useful_term, DROP COLUMN trouble, DROP COLUMN fence;
"""


def upgrade() -> None:
    op.execute(_UPGRADE)


def downgrade() -> None:
    op.execute(_DOWNGRADE)
