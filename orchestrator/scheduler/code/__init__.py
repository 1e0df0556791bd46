"""Runs of workflows as code: their turns."""
