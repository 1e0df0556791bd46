"""Who has logged in to the dashboard: the hash of what their browser shows, and the key of the log-in."""

from __future__ import annotations

from alembic import op

revision = "0026"
down_revision = "0025"


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE orchestrator.sessions (
            hash bytea PRIMARY KEY,
            key_id text NOT NULL,
            created_at timestamptz NOT NULL DEFAULT now(),
            expires_at timestamptz NOT NULL
        )
        """
    )
    op.execute("CREATE INDEX sessions_by_end ON orchestrator.sessions (expires_at)")
    op.execute("CREATE INDEX sessions_of_key ON orchestrator.sessions (key_id)")
    op.execute("COMMENT ON TABLE orchestrator.sessions IS 'who has logged in to the dashboard'")
    op.execute("COMMENT ON COLUMN orchestrator.sessions.hash IS 'SHA-256 of what the browser shows'")
    op.execute(
        "COMMENT ON COLUMN orchestrator.sessions.key_id IS 'the key of the log-in; the session is as good as it'"
    )


def downgrade() -> None:
    op.execute("DROP TABLE orchestrator.sessions")
