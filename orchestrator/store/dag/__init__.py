"""Workflow definitions, and the plans of their runs."""
