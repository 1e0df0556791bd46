"""Runs of workflows as code."""
