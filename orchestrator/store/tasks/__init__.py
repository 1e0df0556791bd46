"""Tasks: creation, claims, state changes, results."""
