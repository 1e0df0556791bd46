"""Flows: graphs of nodes connected by actions, as data, and the planner of their runs."""
