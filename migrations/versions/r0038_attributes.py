"""Attributes of runs, for filters of lists; and an index of the runs whose end other runs await."""

from __future__ import annotations

from alembic import op

from orchestrator.store.compatibility import refuse_loss

revision = "0038"
down_revision = "0037"


def upgrade() -> None:
    op.execute("ALTER TABLE orchestrator.runs ADD COLUMN attributes jsonb")
    op.execute(
        """
        COMMENT ON COLUMN orchestrator.runs.attributes IS
        'what its code has set for lists to be filtered by: names and scalars'
        """
    )
    op.execute(
        """
        CREATE INDEX runs_by_attributes ON orchestrator.runs USING gin (attributes jsonb_path_ops)
         WHERE attributes IS NOT NULL
        """
    )
    op.execute("CREATE INDEX promises_of_runs ON orchestrator.promises (name) WHERE name LIKE 'run %'")


def downgrade() -> None:
    refuse_loss(op.get_bind(), revision, "runs", "attributes IS NOT NULL")
    op.execute("DROP INDEX orchestrator.promises_of_runs")
    op.execute("DROP INDEX orchestrator.runs_by_attributes")
    op.execute("ALTER TABLE orchestrator.runs DROP COLUMN attributes")
