"""Lanes, rates and limits: how many tasks may start, and when."""
