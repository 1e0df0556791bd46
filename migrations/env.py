"""Alembic's entry point; `orchestrator db upgrade` hands in the connection."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from alembic import context
from alembic.runtime.migration import MigrationContext, MigrationInfo
from alembic.script import Script

from orchestrator.store.compatibility import mark
from orchestrator.store.tables import metadata

connection = context.config.attributes["connection"]


def note(ctx: MigrationContext, step: MigrationInfo, heads: Collection[Any], run_args: Mapping[str, Any]) -> None:
    """Write, in the transaction of a migration, which releases may use the schema now."""
    del ctx, heads, run_args
    if step.is_upgrade and isinstance(step.up_revision, Script):
        mark(connection, getattr(step.up_revision.module, "oldest", None))


context.configure(
    connection=connection,
    target_metadata=metadata,
    version_table_schema=context.config.attributes["namespace"],
    include_schemas=True,
    transaction_per_migration=True,
    on_version_apply=note,
)
with context.begin_transaction():
    context.run_migrations()
