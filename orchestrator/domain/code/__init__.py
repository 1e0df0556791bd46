"""Workflows as code: turns, commands, histories."""
