"""Tasks that every worker knows."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from orchestrator.sdk.app import Orchestrator

_TIMEOUT = 30.0


def install(app: Orchestrator) -> None:
    """Add the built-in tasks to an application."""
    app.task(name="orchestrator.webhook")(webhook)


def webhook(url: str, body: Any) -> int:
    """Post JSON to a URL; an answer other than 2xx is a failure, and is tried again."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"A webhook has an http or https address; found {url!r:.200}.")
    request = urllib.request.Request(  # the scheme was checked
        url, json.dumps(body, default=str).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
        return int(answer.status)
