"""The Python API: the application, its tasks, and handles to started tasks and runs."""
