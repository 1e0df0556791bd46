"""Fixtures that several modules here share."""

from tests.integration.stage import engine, system

__all__ = ["engine", "system"]
