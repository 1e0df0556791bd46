"""The rows of tasks: created, changed, found."""
