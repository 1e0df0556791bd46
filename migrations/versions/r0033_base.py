"""The oldest revision that can be upgraded: no release had an earlier one. New databases come from `store/tables`."""

from __future__ import annotations

revision = "0033"
down_revision = None


def upgrade() -> None:
    """Change nothing: a database is at this revision already, or is created at the newest one."""


def downgrade() -> None:
    """Change nothing: `orchestrator db downgrade` ends here."""
