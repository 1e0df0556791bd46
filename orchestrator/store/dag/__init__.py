"""Definitions of workflows, and the plans of their runs."""
