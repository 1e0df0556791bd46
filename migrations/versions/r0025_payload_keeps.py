"""Who else names payloads that are stored outside: they stay for as long as any of these does."""

from __future__ import annotations

from alembic import op

revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE orchestrator.payload_keeps (
            owner uuid NOT NULL,
            keeper uuid NOT NULL,
            PRIMARY KEY (owner, keeper)
        )
        """
    )
    op.execute("COMMENT ON COLUMN orchestrator.payload_keeps.owner IS 'the task or run with which payloads go'")
    op.execute("COMMENT ON COLUMN orchestrator.payload_keeps.keeper IS 'another one that names some of them'")
    op.execute("CREATE INDEX payload_keeps_of_keeper ON orchestrator.payload_keeps (keeper)")


def downgrade() -> None:
    op.execute("DROP TABLE orchestrator.payload_keeps")
