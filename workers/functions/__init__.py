"""Which functions a worker can run."""
