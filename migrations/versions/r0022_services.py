"""Who has registered services over HTTP: what brings them back when Redis has forgotten them."""

from __future__ import annotations

from alembic import op

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE orchestrator.services (
            id text PRIMARY KEY,
            url text NOT NULL,
            services text[] NOT NULL,
            registered_at timestamptz NOT NULL DEFAULT now(),
            seen_at timestamptz NOT NULL DEFAULT now()
        )
        """
    )
    op.execute("CREATE INDEX services_by_time ON orchestrator.services (seen_at)")
    op.execute(
        "COMMENT ON TABLE orchestrator.services IS "
        "'who has registered services over HTTP; who lives, and how busy they are, stands in Redis'"
    )
    op.execute("COMMENT ON COLUMN orchestrator.services.url IS 'what stands before /exec/'")
    op.execute("COMMENT ON COLUMN orchestrator.services.services IS 'what it offers'")
    op.execute("COMMENT ON COLUMN orchestrator.services.seen_at IS 'touched once an hour while it lives'")


def downgrade() -> None:
    op.execute("DROP TABLE orchestrator.services")
