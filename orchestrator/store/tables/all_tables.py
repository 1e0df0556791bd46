"""All tables. `orchestrator db upgrade` creates them; `migrations/` changes older databases; a test compares the
two."""

from orchestrator.store.tables import runs, system, tasks
from orchestrator.store.tables.columns import metadata

__all__ = ["metadata", "runs", "system", "tasks"]
