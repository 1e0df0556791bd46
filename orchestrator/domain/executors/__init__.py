"""Executors: work done outside the worker's own Python, its options and outcomes."""
