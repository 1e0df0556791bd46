"""Integrations with frameworks. Only their users import them, and each imports its framework."""
