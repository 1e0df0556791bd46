"""`orchestrator top`: what happens now, on a terminal."""
