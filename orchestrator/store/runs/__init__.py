"""Runs of any kind: creation, state changes, cancellation."""
