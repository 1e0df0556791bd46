"""Fixtures that several modules here share."""

from tests.integration.code_stage import engine_
from tests.integration.stage import engine, in_empty_folder, system

__all__ = ["engine", "engine_", "in_empty_folder", "system"]
