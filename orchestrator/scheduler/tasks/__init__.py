"""Tasks: apply reports, create and cancel tasks, start runs."""
