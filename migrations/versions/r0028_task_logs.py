"""What tasks said, by attempt."""

from __future__ import annotations

from alembic import op

revision = "0028"
down_revision = "0027"


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE orchestrator.task_logs (
            id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            task_id uuid NOT NULL,
            attempt integer NOT NULL,
            part integer NOT NULL,
            run_id uuid,
            step text NOT NULL,
            stored_at timestamptz NOT NULL DEFAULT now(),
            lines bytea NOT NULL
        )
        """
    )
    op.execute("COMMENT ON TABLE orchestrator.task_logs IS 'what tasks said; only appended to, and trimmed'")
    op.execute("COMMENT ON COLUMN orchestrator.task_logs.part IS 'counts the chunks of an attempt, from 0'")
    op.execute("COMMENT ON COLUMN orchestrator.task_logs.step IS 'the step that the task is of, or its name'")
    op.execute("COMMENT ON COLUMN orchestrator.task_logs.lines IS 'encoded lines, whose texts may be sealed'")
    op.execute("CREATE UNIQUE INDEX task_logs_by_task ON orchestrator.task_logs (task_id, attempt, part)")
    op.execute("CREATE INDEX task_logs_by_run ON orchestrator.task_logs (run_id, id) WHERE run_id IS NOT NULL")


def downgrade() -> None:
    op.execute("DROP TABLE orchestrator.task_logs")
