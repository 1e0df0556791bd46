"""Keys of the HTTP API: what each may do, until when. Only a hash of each is kept."""

from __future__ import annotations

from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE orchestrator.api_keys (
            id text PRIMARY KEY,
            name text NOT NULL,
            hash bytea NOT NULL,
            scope text NOT NULL,
            created_at timestamptz NOT NULL DEFAULT now(),
            expires_at timestamptz,
            revoked_at timestamptz
        )
        """
    )
    op.execute("COMMENT ON COLUMN orchestrator.api_keys.id IS 'the part of the key that may be shown'")
    op.execute("COMMENT ON COLUMN orchestrator.api_keys.hash IS 'SHA-256 of the secret part'")
    op.execute("COMMENT ON COLUMN orchestrator.api_keys.scope IS 'read, enqueue, operate or admin'")


def downgrade() -> None:
    op.execute("DROP TABLE orchestrator.api_keys")
