"""Runs of flow graphs: plan them, and create their tasks."""
