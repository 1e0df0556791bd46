"""Inside a worker process: what runs tasks."""
