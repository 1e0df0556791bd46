"""The span that a task or a run came of, so that one trace goes from its caller to all that comes of it."""

from __future__ import annotations

from alembic import op

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    op.execute("ALTER TABLE orchestrator.tasks ADD COLUMN trace text, ADD COLUMN ready_at timestamptz")
    op.execute("ALTER TABLE orchestrator.ended_tasks ADD COLUMN trace text")
    op.execute("ALTER TABLE orchestrator.runs ADD COLUMN trace text")
    op.execute("COMMENT ON COLUMN orchestrator.tasks.trace IS 'the span that it came of, as a W3C traceparent'")
    op.execute("COMMENT ON COLUMN orchestrator.tasks.ready_at IS 'of one that is traced: when its delay was over'")
    op.execute(
        "COMMENT ON COLUMN orchestrator.runs.trace IS "
        "'the span that it came of, as a W3C traceparent; its own where it came of none'"
    )


def downgrade() -> None:
    op.execute("ALTER TABLE orchestrator.runs DROP COLUMN trace")
    op.execute("ALTER TABLE orchestrator.ended_tasks DROP COLUMN trace")
    op.execute("ALTER TABLE orchestrator.tasks DROP COLUMN ready_at, DROP COLUMN trace")
