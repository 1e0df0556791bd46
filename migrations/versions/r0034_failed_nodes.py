"""The error policy of flow nodes: each version keeps the policy under which it was published."""

from __future__ import annotations

from alembic import op

from orchestrator.store.compatibility import refuse_loss

revision = "0034"
down_revision = "0033"


def upgrade() -> None:
    op.execute("ALTER TABLE orchestrator.flows ADD COLUMN on_error text NOT NULL DEFAULT 'default'")
    op.execute("COMMENT ON COLUMN orchestrator.flows.on_error IS 'default or fail: what failed nodes do'")


def downgrade() -> None:
    refuse_loss(op.get_bind(), revision, "flows", "on_error <> 'default'")
    op.execute("ALTER TABLE orchestrator.flows DROP COLUMN on_error")
