"""Commands for schedules and backfills."""
