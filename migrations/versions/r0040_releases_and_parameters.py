"""The release of the application that each worker ran, and the parameters of tasks."""

from __future__ import annotations

from alembic import op

from orchestrator.store.compatibility import refuse_loss

revision = "0040"
down_revision = "0039"


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE orchestrator.worker_releases (
            worker text PRIMARY KEY,
            release text NOT NULL,
            started_at timestamptz NOT NULL,
            until timestamptz NOT NULL
        )
        """
    )
    op.execute(
        "COMMENT ON TABLE orchestrator.worker_releases IS "
        "'which release workers ran, also those that have ended; attempts name the worker'"
    )
    op.execute("COMMENT ON COLUMN orchestrator.worker_releases.release IS 'the release of its application'")
    op.execute(
        "COMMENT ON COLUMN orchestrator.worker_releases.until IS "
        "'when it is forgotten; attempts may be kept until then'"
    )
    op.execute("CREATE INDEX worker_releases_by_release ON orchestrator.worker_releases (release, started_at)")
    op.execute("CREATE INDEX worker_releases_by_end ON orchestrator.worker_releases (until)")
    op.execute("CREATE TABLE orchestrator.task_parameters (name text PRIMARY KEY, parameters jsonb NOT NULL)")
    op.execute("COMMENT ON TABLE orchestrator.task_parameters IS 'what functions take, as workers last announced it'")
    op.execute("COMMENT ON COLUMN orchestrator.task_parameters.name IS 'a task or a workflow as code'")


def downgrade() -> None:
    refuse_loss(op.get_bind(), revision, "worker_releases", "release <> ''")
    op.execute("DROP TABLE orchestrator.worker_releases")
    op.execute("DROP TABLE orchestrator.task_parameters")
