"""Chaos for the bridge: Celery's producers, workers and Redis, bridges, our scheduler and workers are killed often.

Each task records its start and its end. In the end, each sent message must have run exactly once; a second run is
allowed only if the worker of the first was killed.
"""
