"""Alembic's entry point; `orchestrator db upgrade` hands in the connection."""

from __future__ import annotations

from alembic import context

from orchestrator.store.tables import metadata

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=metadata,
    version_table_schema=context.config.attributes["namespace"],
    include_schemas=True,
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
