"""Fixtures that several modules here share."""

from tests.integration.code_stage import engine_
from tests.integration.stage import addresses, engine, in_empty_folder, system, way

__all__ = ["addresses", "engine", "engine_", "in_empty_folder", "system", "way"]
