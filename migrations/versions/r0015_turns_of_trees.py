"""What runs are to be told is found tree by tree of runs, not in the order in which it came."""

from __future__ import annotations

from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.execute("CREATE INDEX untold_by_turns ON orchestrator.untold (run_id, id) WHERE NOT held")
    op.execute("DROP INDEX orchestrator.untold_next")


def downgrade() -> None:
    op.execute("CREATE INDEX untold_next ON orchestrator.untold (id) WHERE NOT held")
    op.execute("DROP INDEX orchestrator.untold_by_turns")
