"""Dispatch ready tasks to workers."""
