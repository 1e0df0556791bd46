"""Shared by all commands: options, ids, times, tables, JSON."""
