"""Runs of workflows as code: their histories, and what they wait for."""
