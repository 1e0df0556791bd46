"""Empty tables before a test."""

from orchestrator.store.emptying import TABLES, empty

__all__ = ["TABLES", "empty"]
