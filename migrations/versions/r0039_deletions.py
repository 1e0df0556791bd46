"""Runs that users have deleted, for the next round of retention."""

from __future__ import annotations

from alembic import op

from orchestrator.store.compatibility import refuse_loss

revision = "0039"
down_revision = "0038"


def upgrade() -> None:
    op.execute("CREATE TABLE orchestrator.deletions (run_id uuid CONSTRAINT deletions_pkey PRIMARY KEY)")
    op.execute(
        """
        COMMENT ON TABLE orchestrator.deletions IS
        'ended runs that somebody has deleted: the next round of retention removes them with all that is theirs'
        """
    )


def downgrade() -> None:
    refuse_loss(op.get_bind(), revision, "deletions", "run_id IS NOT NULL")
    op.execute("DROP TABLE orchestrator.deletions")
