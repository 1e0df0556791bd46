"""Runs of flow graphs: planned and ended."""
