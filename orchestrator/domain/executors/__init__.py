"""Work that is done outside the worker's own Python: what a task asks for, and what came of it."""
