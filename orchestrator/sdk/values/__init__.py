"""Arguments and results as data."""
