"""`orchestrator dev`."""

FOLLOW = "ORCHESTRATOR_FOLLOW"
"""The variable in which a parent leaves its process id for processes that end with it."""
