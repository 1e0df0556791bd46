"""Runs of DAGs: plan them, and create their tasks."""
