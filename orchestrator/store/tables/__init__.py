"""The tables. `orchestrator db upgrade` creates them, or `migrations/` changes older ones; a test compares the two."""

from orchestrator.store.tables import runs, system, tasks
from orchestrator.store.tables.columns import KEPT, SCHEMA, metadata

__all__ = ["KEPT", "SCHEMA", "definitions", "metadata", "runs", "system", "tasks"]
