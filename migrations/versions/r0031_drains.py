"""Workers that are told to drain, and what they take of memory."""

from __future__ import annotations

from alembic import op

revision = "0031"
down_revision = "0030"


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE orchestrator.drains (
            parent uuid PRIMARY KEY,
            asked_at timestamptz NOT NULL DEFAULT now()
        )
        """
    )
    op.execute("COMMENT ON TABLE orchestrator.drains IS 'workers that somebody wants to end'")
    op.execute("COMMENT ON COLUMN orchestrator.drains.parent IS 'one life of a worker''s parent process'")
    op.execute(
        """
        ALTER TABLE orchestrator.workers
            ADD COLUMN parent uuid, ADD COLUMN memory bigint, ADD COLUMN parent_memory bigint
        """
    )
    op.execute(
        "COMMENT ON COLUMN orchestrator.workers.parent IS "
        "'one life of its parent process, by which it is told to drain'"
    )
    op.execute("COMMENT ON COLUMN orchestrator.workers.memory IS 'bytes that it has in RAM'")
    op.execute("COMMENT ON COLUMN orchestrator.workers.parent_memory IS 'bytes that its parent process has in RAM'")


def downgrade() -> None:
    op.execute("ALTER TABLE orchestrator.workers DROP COLUMN parent, DROP COLUMN memory, DROP COLUMN parent_memory")
    op.execute("DROP TABLE orchestrator.drains")
