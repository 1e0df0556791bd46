"""Commands for tasks."""
