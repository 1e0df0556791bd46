"""Workflow definitions: files, builder, runs."""
