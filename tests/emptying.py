"""Tables without rows, for the next test."""

from orchestrator.store.emptying import TABLES, empty

__all__ = ["TABLES", "empty"]
