"""Schedules, their fires, and backfills."""
