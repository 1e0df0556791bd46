"""`orchestrator api`."""

from __future__ import annotations

import click

from orchestrator.cli.dev.parent import begin_process
from orchestrator.cli.terminal.options import log_options
from orchestrator.errors import ConfigurationError

PORT = 8000


@click.command("api", context_settings={"show_default": True})
@click.option("--host", default="127.0.0.1", help="The address to serve.")
@click.option("--port", type=click.IntRange(0, 65_535), default=PORT, help="The port; 0 for any free one.")
@click.option("--or-any", is_flag=True, help="Use any free port if the given one is taken.")
@click.option("--tls-cert", metavar="FILE", help="Use TLS with this certificate, in PEM format.")
@click.option("--tls-key", metavar="FILE", help="The certificate's key, if it is in another file.")
@log_options
def command(host: str, port: int, or_any: bool, tls_cert: str | None, tls_key: str | None, **log: str | None) -> None:
    """Serve the HTTP API: the functions of this command line for browsers, scripts and other languages.

    Once a key exists (orchestrator keys create), every request needs one. Before that, the API serves this machine
    only. /docs shows every route; /openapi.json is for programs.

    \b
    Example:
      orchestrator api --port 8000
      curl -s localhost:8000/api/v1/tasks?status=failed
      orchestrator api --host 0.0.0.0 --port 8443 --tls-cert api.pem --tls-key api.key
    """
    if tls_key is not None and tls_cert is None:
        raise click.UsageError("--tls-key belongs to a certificate: give --tls-cert too.")
    settings = begin_process(**log)
    settings.require_database()
    settings.require_redis()
    try:
        from orchestrator.api.server import Certificate, serve
    except ImportError as error:
        raise ConfigurationError(
            f"The HTTP API needs a package that is not installed, {error.name}. Install it with the extra `api`: "
            f"pip install 'durable-orchestrator[api]'"
        ) from error
    certificate = None if tls_cert is None else Certificate(tls_cert, tls_key)
    serve(settings, host, port, or_any=or_any, certificate=certificate)
