"""Lanes, rates and limits: who may start, and when."""
