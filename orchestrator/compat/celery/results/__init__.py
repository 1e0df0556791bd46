"""Results by Celery's API: of one call, and of many."""
