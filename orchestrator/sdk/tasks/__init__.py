"""Tasks, their options and handles."""
