"""Runs of flow graphs: told, planned, and ended."""
