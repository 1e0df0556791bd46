"""Lanes, rates and limits: which tasks may start, and when."""
