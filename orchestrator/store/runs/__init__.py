"""The rows of runs of any kind."""
