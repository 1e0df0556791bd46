"""Post JSON to an address that a workflow gives, and nowhere else.

The request goes out as those of executors do (`workers/executors/asking.py`): the name is resolved once, each of its
addresses is judged, and the connection is made to one that was found good. Redirects are not followed, and proxies of
the environment, which would resolve the name for themselves, are not used.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from orchestrator.domain.tasks.destinations import Destinations, parse_destinations
from orchestrator.errors import GiveUp
from orchestrator.sdk.app import Orchestrator

if TYPE_CHECKING:
    from orchestrator.workers.executors.asking import Place, Request

_TIMEOUT = 30.0
_PORTS = {"http": 80, "https": 443}
_AS_IT_IS = "!#$%&'()*+,/:;=?@[]~"
"""Characters of a path and query; the rest is quoted."""


class WebhookFailed(Exception):
    """The other side did not take a webhook."""


def install(app: Orchestrator) -> None:
    """Add the task that posts webhooks to an application: every worker knows it."""
    destinations = parse_destinations(app.settings.webhooks, app.settings.webhook_allow)

    @app.task(name="orchestrator.webhook")
    def webhook(url: str, body: Any) -> int:
        return post(url, body, destinations)


def post(url: str, body: Any, destinations: Destinations) -> int:
    """Post JSON; return the answer's status. An answer other than 2xx is a failure, and is tried again."""
    from orchestrator.workers.executors import asking  # with the first of them: a process starts sooner without h11

    if destinations.mode == "off":
        raise GiveUp("Webhooks are turned off for this worker (setting webhooks).")
    host, port, is_secure, path = _parse(url)
    try:
        data = json.dumps(body, default=str, allow_nan=False).encode()
    except ValueError as error:
        raise GiveUp(f"The body of the webhook goes out as JSON, which has no NaN and no infinity: {error}.") from None
    try:
        place, request = asking.Place(host, port, is_secure, ""), asking.Request("POST", path, data)
        status = asyncio.run(_status(place, request, destinations))
    except asking.Barred as error:
        raise GiveUp(f"The webhook is not sent: {error}. The worker's operator can allow it.") from None
    except asking.Unanswered as error:
        if isinstance(error.__cause__, UnicodeError):
            raise GiveUp("The host of the webhook is no name that can be resolved.") from None
        raise WebhookFailed(f"{error}.") from error
    except asking.Unreadable as error:
        raise WebhookFailed(f"{error}.") from error
    except TimeoutError as error:
        raise WebhookFailed(f"{host} did not answer within {_TIMEOUT:g} s.") from error
    if not 200 <= status < 300:
        remark = " Redirects are not followed: give the address that they lead to." if 300 <= status < 400 else ""
        raise WebhookFailed(f"{host} answered with status {status}, where 2xx was expected.{remark}")
    return status


async def _status(place: Place, request: Request, destinations: Destinations) -> int:
    from orchestrator.workers.executors import asking

    async with asyncio.timeout(_TIMEOUT), asking.opened(place, request, allowed=destinations) as incoming:
        return incoming.head.status


def _parse(url: str) -> tuple[str, int, bool, str]:
    """Take an address apart; what is wrong with it is said without it, for it may hold a secret."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise GiveUp("The address of the webhook cannot be read.") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise GiveUp(f"A webhook has an http or https address; found one with {parts.scheme[:20] or 'no scheme'!r}.")
    if parts.username is not None or parts.password is not None:
        raise GiveUp("The address of a webhook cannot hold a user or password: put a token into its path or its body.")
    path = quote(parts.path or "/", safe=_AS_IT_IS) + (f"?{quote(parts.query, safe=_AS_IT_IS)}" if parts.query else "")
    return parts.hostname, port or _PORTS[parts.scheme], parts.scheme == "https", path
