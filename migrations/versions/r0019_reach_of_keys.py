"""Keys that are for some queues and workflows only."""

from __future__ import annotations

from alembic import op

revision = "0019"
down_revision = "0018"

_COLUMNS = {
    "queues": "what the names of the queues that it is for begin with",
    "workflows": "what the names of the workflows that it is for begin with",
}


def upgrade() -> None:
    for name, comment in _COLUMNS.items():
        op.execute(f"ALTER TABLE orchestrator.api_keys ADD COLUMN {name} text")
        op.execute(f"COMMENT ON COLUMN orchestrator.api_keys.{name} IS '{comment}'")


def downgrade() -> None:
    op.execute("DELETE FROM orchestrator.api_keys WHERE queues IS NOT NULL OR workflows IS NOT NULL")
    for name in _COLUMNS:
        op.execute(f"ALTER TABLE orchestrator.api_keys DROP COLUMN {name}")
