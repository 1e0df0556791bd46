"""What people said of promises that no code waits for yet."""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"

_UPGRADE = """
CREATE TABLE orchestrator.resolutions (
    run_id uuid NOT NULL,
    name text NOT NULL,
    number integer NOT NULL,
    value bytea,
    error jsonb,
    PRIMARY KEY (run_id, name, number)
);

COMMENT ON TABLE orchestrator.resolutions IS 'promises that were settled before the code waits for them, by name';
COMMENT ON COLUMN orchestrator.resolutions.number IS 'its place among those of a name; 0 says that one was settled';
"""


def upgrade() -> None:
    op.execute(_UPGRADE)


def downgrade() -> None:
    op.execute("DROP TABLE orchestrator.resolutions")
