"""Commands that run a scheduler or worker, or show them."""
