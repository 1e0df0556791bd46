"""Calls that wait, blocking and async from one source."""
