"""Metrics, liveness and readiness of processes, for monitoring systems."""
