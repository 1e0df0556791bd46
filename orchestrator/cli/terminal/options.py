"""Options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import click

from orchestrator.domain.durations import parse_duration
from orchestrator.errors import ConfigurationError
from orchestrator.monitoring.times import present
from orchestrator.settings import CHOICES, Settings

F = TypeVar("F", bound=Callable[..., Any])

app_option = click.option(
    "--app", metavar="MODULE:APP", help="The application. Default: the setting `app`.", show_default=False
)
yes_option = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
certain_option = click.option(
    "--yes", is_flag=True, help="Do not ask for confirmation. Without a terminal, the command never asks."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def log_options(command: F) -> F:
    """Add the logging options of a long-running process; the defaults come from the settings."""
    for name, metavar, what in (("log_format", "FORMAT", "How to log"), ("log_level", "LEVEL", "Log this and above")):
        text = f"{what}: {', '.join(CHOICES[name])}. Default: the setting `{name}`."
        choice = click.Choice(CHOICES[name], case_sensitive=False)
        command = click.option(f"--{name.replace('_', '-')}", type=choice, metavar=metavar, help=text)(command)
    return command


def metrics_option(command: F) -> F:
    """Add the option for the address of the metrics endpoint."""
    return click.option(
        "--metrics",
        metavar="[HOST:]PORT",
        help="Serve /metrics, /healthz and /readyz here; without a host, to this machine alone. Default: the setting "
        "`metrics`, else nowhere.",
    )(command)


def page_options(identifier: click.ParamType[UUID]) -> Callable[[F], F]:
    """Return the options of a list that is paged backwards in time."""

    def add(command: F) -> F:
        command = click.option("--before", type=identifier, metavar="ID", help="Continue after this id.")(command)
        return click.option(
            "--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="How many to show."
        )(command)

    return add


def status_option(states: Any) -> Callable[[F], F]:
    return click.option(
        "--status",
        "statuses",
        multiple=True,
        type=click.Choice([str(state) for state in states]),
        help="Only in this state; may be repeated.",
    )


def moment(value: str) -> datetime:
    """Parse a time in the past: an age (`2h`, `1d12h`) or a moment (`2024-01-31`, `2024-01-31T09:30`; UTC)."""
    seconds = parse_duration(value)
    try:
        if seconds is not None:
            return present() - timedelta(seconds=seconds)
        parsed = datetime.fromisoformat(value)
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{value!r} is neither a duration such as 2h nor a time such as 2024-01-31T09:30."
        ) from None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


def require_app(settings: Settings) -> str:
    """Return the application's `module:app`; raise ConfigurationError with the ways to set it."""
    if not settings.app:
        raise ConfigurationError(
            "No application is given. Give it with --app module:app (e.g. --app shop.tasks:app), as ORCHESTRATOR_APP, "
            'or as app = "module:app" under [tool.orchestrator] in pyproject.toml.'
        )
    return settings.app
