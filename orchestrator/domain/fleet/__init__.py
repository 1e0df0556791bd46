"""Dispatch windows, generations and announced names."""
