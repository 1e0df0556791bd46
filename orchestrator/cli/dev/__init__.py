"""`orchestrator dev`."""
