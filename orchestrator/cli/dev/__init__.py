"""`orchestrator dev`."""

FOLLOW = "ORCHESTRATOR_FOLLOW"
"""Environment variable with the process id of the parent, with which a child process ends."""
