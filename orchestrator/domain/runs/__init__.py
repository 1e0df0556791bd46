"""Runs of any kind: what happens to them, and when they end."""
