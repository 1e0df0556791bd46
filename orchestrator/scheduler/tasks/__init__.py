"""Tasks: reported, created, due."""
