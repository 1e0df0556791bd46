"""Runs of DAGs: planned."""
