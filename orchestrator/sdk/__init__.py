"""The Python API: the application, its tasks, and handles to what it started."""
