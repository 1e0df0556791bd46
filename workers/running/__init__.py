"""Running of tasks inside a worker process."""
