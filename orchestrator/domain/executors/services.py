"""HTTP services, and the order in which their workers are asked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import msgspec

SERVICE_NAME = r"[\w.:/-]{1,200}"
"""The pattern for names of services, the same as for tasks."""


class ServiceWorker(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process that answers `POST /exec/<service>`, as registered."""

    id: str
    url: str
    """The base URL, to which `/exec/<service>` is appended."""
    services: tuple[str, ...] = ()
    load: float = 0.0
    """The load in its last heartbeat."""
    heard_at: float = 0.0
    """The time of its last heartbeat, in Unix seconds by the clock of Redis."""
    kept_at: float = 0.0
    """The time of the last heartbeat that was stored in Postgres."""


def in_order(
    workers: Sequence[ServiceWorker], draws: Sequence[float], busy: Mapping[str, int], *, by_load: bool = True
) -> list[ServiceWorker]:
    """Return workers in random order, with less loaded ones more likely first.

    A worker with a load of 3 comes first a quarter as often as an idle one. `draws` has a random number between 0 and 1
    for each worker. `busy` counts the requests to each worker since its last heartbeat, which its load does not
    include.
    """
    weights = [1.0 / (1.0 + max(0.0, worker.load) + busy.get(worker.id, 0)) if by_load else 1.0 for worker in workers]
    # Weighted sampling without replacement (Efraimidis and Spirakis): sort by u ** (1 / weight).
    ranks = [draw ** (1.0 / weight) for draw, weight in zip(draws, weights, strict=True)]
    return [workers[index] for index in sorted(range(len(workers)), key=lambda index: -ranks[index])]


def address_problem(url: str) -> str | None:
    """Return what is wrong with the URL of a service, or None if it is valid."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "expected an address such as http://10.0.0.7:8080"
    if parts.username is not None or parts.password is not None:
        return "it cannot hold a user or password"
    if parts.query or parts.fragment:
        return "`/exec/<service>` is appended to it, so nothing can follow the path"
    if not url.isascii() or not url.isprintable() or " " in url:
        return "expected ASCII letters, digits and punctuation only"
    return None


def service_problem(name: str) -> str | None:
    """Return what is wrong with the name of a service, or None if it is valid."""
    if re.fullmatch(SERVICE_NAME, name):
        return None
    return f"expected up to 200 letters, digits and the signs _ . : / -, found {name!r:.100}"
