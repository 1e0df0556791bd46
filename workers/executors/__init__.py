"""Executors, which run the work of tasks outside the worker's own Python."""
