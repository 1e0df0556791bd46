"""API keys that may enqueue only some tasks, and quotas of API keys."""

from __future__ import annotations

from alembic import op

from orchestrator.store.compatibility import refuse_loss

revision = "0035"
down_revision = "0034"

_COLUMNS = {
    "tasks text": "what the names of the tasks that it may enqueue begin with, with commas between",
    "quotas jsonb": "its quotas, where they are not the defaults",
}


def upgrade() -> None:
    for column, comment in _COLUMNS.items():
        op.execute(f"ALTER TABLE orchestrator.api_keys ADD COLUMN {column}")
        op.execute(f"COMMENT ON COLUMN orchestrator.api_keys.{column.split()[0]} IS '{comment}'")


def downgrade() -> None:
    refuse_loss(op.get_bind(), revision, "api_keys", "tasks IS NOT NULL OR quotas IS NOT NULL")
    for column in _COLUMNS:
        op.execute(f"ALTER TABLE orchestrator.api_keys DROP COLUMN {column.split()[0]}")
