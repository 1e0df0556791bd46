"""Lanes and queues: what limits tasks."""
