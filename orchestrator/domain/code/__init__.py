"""Workflows as code: turns, commands and histories."""
