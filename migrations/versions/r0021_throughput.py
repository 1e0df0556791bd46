"""What ended, and how long it took, every ten seconds: for those who look at the last hour."""

from __future__ import annotations

from alembic import op

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE orchestrator.throughput (
            bucket timestamptz NOT NULL,
            queue text NOT NULL,
            term bigint NOT NULL,
            success bigint NOT NULL,
            failed bigint NOT NULL,
            cancelled bigint NOT NULL,
            skipped bigint NOT NULL,
            dispatched bigint NOT NULL,
            retried bigint NOT NULL,
            lost bigint NOT NULL,
            waits bigint[] NOT NULL,
            runs bigint[] NOT NULL,
            PRIMARY KEY (bucket, queue, term)
        )
        """
    )
    op.execute("COMMENT ON COLUMN orchestrator.throughput.bucket IS 'where ten seconds begin'")
    op.execute("COMMENT ON COLUMN orchestrator.throughput.term IS 'of the leader that has counted'")
    op.execute("COMMENT ON COLUMN orchestrator.throughput.waits IS 'how many waited how long, by bounds'")
    op.execute("COMMENT ON COLUMN orchestrator.throughput.runs IS 'how many ran how long, by bounds'")
    op.execute(
        "CREATE INDEX runs_open_of_code ON orchestrator.runs (workflow, version) "
        "WHERE code AND ended_at IS NULL AND workflow IS NOT NULL"
    )


def downgrade() -> None:
    op.execute("DROP INDEX orchestrator.runs_open_of_code")
    op.execute("DROP TABLE orchestrator.throughput")
