"""Runs of workflows as code: histories, turns, timers and promises."""
