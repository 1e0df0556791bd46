"""Where tasks are done if not by the worker's own Python: one file for each executor."""
