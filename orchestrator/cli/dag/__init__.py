"""Commands for workflow definitions and events."""
