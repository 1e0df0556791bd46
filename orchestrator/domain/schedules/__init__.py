"""The times at which schedules fire."""
