"""All tables. `orchestrator db upgrade` creates them; `migrations/` upgrades older databases to the same schema."""

from orchestrator.store.tables import runs, system, tasks
from orchestrator.store.tables.columns import metadata

__all__ = ["metadata", "runs", "system", "tasks"]
