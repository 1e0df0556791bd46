"""`orchestrator serve`."""

from __future__ import annotations

from typing import Any

import click

from orchestrator.cli.dev.parent import begin_process
from orchestrator.cli.terminal.options import app_option, log_options, require_app
from orchestrator.domain.executors.services import address_problem
from orchestrator.errors import ConfigurationError
from orchestrator.workers.functions import load_app

PORT = 8080


@click.command("serve", context_settings={"show_default": True})
@app_option
@click.option("--host", default="127.0.0.1", help="The address to serve.")
@click.option("--port", type=click.IntRange(0, 65_535), default=PORT, help="The port; 0 for any free one.")
@click.option("--registry", metavar="URL", help="The HTTP API to register with. Default: the setting `api_url`.")
@click.option("--advertise", metavar="URL", default="", help="The URL by which others reach this process.")
@click.option("--service", "services", multiple=True, metavar="NAME", help="Serve this task only. May be repeated.")
@click.option("--concurrency", type=click.IntRange(1, 1_000), default=10, help="How many requests to work on at once.")
@log_options
def command(registry: str | None, advertise: str, **options: Any) -> None:
    """Serve an application's tasks over HTTP: POST /exec/NAME with {"input": …, "params": {…}}.

    Tasks with the executor http, also those of other applications, are sent here: the process registers, sends
    heartbeats with its load, and unregisters when it stops. If service_keys are set, every request needs one of them;
    otherwise, only this machine is served.

    \b
    Example:
      orchestrator serve --app shop.services:app --port 8080 --registry http://localhost:8000
      curl -d '{"input": [1, 2, 3]}' localhost:8080/exec/sum
    """
    settings = begin_process(**{name: options.pop(name) for name in ("app", "log_level", "log_format")})
    for option, address in (("--registry", registry), ("--advertise", advertise)):
        if address and (problem := address_problem(address)):
            raise click.UsageError(f"{option}: {problem}, found {address!r}.")
    try:
        from orchestrator.workers.serving.server import Serving, serve
    except ImportError as error:
        raise ConfigurationError(
            f"Serving tasks needs a package that is not installed, {error.name}. Install it with the extra `api`: "
            f"pip install 'durable-orchestrator[api]'"
        ) from error
    application = load_app(require_app(settings))
    application._resources.start()
    registry_url = settings.api_url if registry is None else registry
    serve(application, Serving(registry=registry_url, advertise=advertise.rstrip("/"), **options))
