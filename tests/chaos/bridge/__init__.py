"""Producers and workers of Celery, bridges, our scheduler and workers, and Celery's Redis, all killed again and again.

Each task writes a line when it begins and one when it ends. Afterwards each message that a producer has sent must have
run, and once: only a run whose own worker was killed may have been followed by another.
"""
