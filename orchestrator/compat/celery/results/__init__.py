"""Celery's result classes: of one call, and of several."""
