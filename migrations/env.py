"""Alembic's entry point; `orchestrator db upgrade` passes the connection."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from alembic import context
from alembic.runtime.migration import MigrationContext, MigrationInfo

from orchestrator.store.compatibility import FIRST, write_oldest_revision
from orchestrator.store.tables.all_tables import metadata

connection = context.config.attributes["connection"]


def note(ctx: MigrationContext, step: MigrationInfo, heads: Collection[Any], run_args: Mapping[str, Any]) -> None:
    """Write the oldest supported revision to the schema (`store/compatibility.py`), in the migration's transaction."""
    del ctx, step, run_args
    applied = context.script.iterate_revisions(tuple(heads), "base") if heads else ()
    write_oldest_revision(
        connection, max([FIRST, *(getattr(script.module, "oldest", None) or FIRST for script in applied)])
    )


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
