"""The parent of a worker's processes."""
