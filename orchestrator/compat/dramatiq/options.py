"""Dramatiq's options of actors and messages. Times are milliseconds there and seconds here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.compat.coverage import DRAMATIQ, refused
from orchestrator.errors import InvalidTask
from orchestrator.sdk.tasks.retry import Retry

DEFAULTS: Mapping[str, Any] = {
    "max_retries": 20,
    "min_backoff": 15_000,
    "max_backoff": 7 * 86_400_000,
    "time_limit": 600_000,
}
"""Of actors, as Dramatiq's middleware has them."""
_REFUSED = refused(DRAMATIQ.calls["actor"])
_RETRIES = ("max_retries", "min_backoff", "max_backoff", "throws")
_SECONDS = {"time_limit": "timeout", "max_age": "expires", "delay": "delay"}
_NO_EFFECT = ("store_results", "result_ttl", "pipe_target", "pipe_ignore")
_MOST = 100
"""The highest priority here."""


def native_options(given: Mapping[str, Any], declared: Mapping[str, Any] = DEFAULTS) -> dict[str, Any]:
    """Return options of an actor or a message as those of a task; `declared` are those that the actor has."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in _REFUSED and value is not None:
            raise InvalidTask(f"Option {name} of Dramatiq is not covered: {_REFUSED[name]}.")
        if name in _SECONDS:
            if value is not None and value != float("inf"):
                found[_SECONDS[name]] = value / 1_000
        elif name == "priority":
            found["priority"] = max(-_MOST, min(_MOST, -value))
        elif name not in (*_RETRIES, *_NO_EFFECT, *_REFUSED):
            raise InvalidTask(f"Unknown option {name!r} of Dramatiq.")
    if any(name in given for name in _RETRIES):
        chosen = {**DEFAULTS, **declared, **given}
        found["retries"] = Retry(
            max=1_000_000 if chosen["max_retries"] is None else chosen["max_retries"],
            base=max(0.001, chosen["min_backoff"] / 1_000),
            cap=max(0.001, chosen["max_backoff"] / 1_000),
            give_up_on=chosen.get("throws") or (),
        )
    return found
