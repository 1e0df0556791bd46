"""Runs that start runs know how deep they are, and below which."""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"

_UPGRADE = """
ALTER TABLE orchestrator.runs
    ADD COLUMN depth integer NOT NULL DEFAULT 0,
    ADD COLUMN root uuid,
    ADD COLUMN descendants integer NOT NULL DEFAULT 0;
COMMENT ON COLUMN orchestrator.runs.depth IS 'how many runs stand above it that started each other';
COMMENT ON COLUMN orchestrator.runs.root IS 'the first of these';
COMMENT ON COLUMN orchestrator.runs.descendants IS 'how many runs have come of it';
"""


def upgrade() -> None:
    op.execute(_UPGRADE)


def downgrade() -> None:
    op.execute("ALTER TABLE orchestrator.runs DROP COLUMN depth, DROP COLUMN root, DROP COLUMN descendants")
