"""Dispatch windows, generations, and the names that workers announce."""
