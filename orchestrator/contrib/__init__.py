"""Integrations with frameworks. Nothing else imports them, and they import their framework."""
