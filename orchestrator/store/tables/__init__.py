"""The tables, as SQLAlchemy Core sees them. `migrations/` creates them; a test holds the two together."""

from orchestrator.store.tables import definitions, runs, system, tasks
from orchestrator.store.tables.columns import KEPT, SCHEMA, metadata

__all__ = ["KEPT", "SCHEMA", "definitions", "metadata", "runs", "system", "tasks"]
