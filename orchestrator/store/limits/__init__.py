"""Lanes and queue settings, which limit the dispatch of tasks."""
