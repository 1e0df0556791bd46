"""Workflows as data: definitions, expressions, and the plan of a run."""
