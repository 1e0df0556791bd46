"""`orchestrator top`: a live view of the system on a terminal."""
