"""Tasks that every worker knows."""

from __future__ import annotations

from typing import Any

from orchestrator.domain.tasks.destinations import parse_destinations
from orchestrator.sdk.app import Orchestrator
from orchestrator.workers.functions.webhook import post


def install(app: Orchestrator) -> None:
    """Add the built-in tasks to an application."""
    destinations = parse_destinations(app.settings.webhooks, app.settings.webhook_allow)

    @app.task(name="orchestrator.webhook")
    def webhook(url: str, body: Any) -> int:
        return post(url, body, destinations)
