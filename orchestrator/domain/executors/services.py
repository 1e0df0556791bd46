"""Services over HTTP, and the order in which to ask them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import msgspec

SERVICE_NAME = r"[\w.:/-]{1,200}"
"""The pattern of names of services: that of tasks."""


class ServiceWorker(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process that answers `POST /exec/<service>`, as the registry knows it."""

    id: str
    url: str
    """The address before `/exec/`."""
    services: tuple[str, ...] = ()
    load: float = 0.0
    """Its load, by its last heartbeat."""
    heard_at: float = 0.0
    """When it said so: seconds since 1970, by the clock of Redis."""
    kept_at: float = 0.0
    """When its last sign of life was stored in Postgres."""


def in_order(
    workers: Sequence[ServiceWorker], draws: Sequence[float], busy: Mapping[str, int], *, by_load: bool = True
) -> list[ServiceWorker]:
    """Return workers in the order in which they are asked: by chance, and the less loaded ones rather.

    A worker with a load of 3 comes first a quarter as often as one without. `draws` has a random number between 0 and 1
    for each; `busy` counts by worker what it was asked for since it last spoke, which its load does not hold yet.
    """
    weights = [1.0 / (1.0 + max(0.0, one.load) + busy.get(one.id, 0)) if by_load else 1.0 for one in workers]
    # The largest of u ** (1 / w) is a choice by weight, and so is the next among those that are left.
    ranks = [draw ** (1.0 / weight) for draw, weight in zip(draws, weights, strict=True)]
    return [workers[place] for place in sorted(range(len(workers)), key=lambda place: -ranks[place])]


def address_problem(url: str) -> str | None:
    """Return what is wrong with the address of a service; None if nothing is."""
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
        return "expected letters, digits and signs of ASCII only"
    return None


def service_problem(name: str) -> str | None:
    """Return what is wrong with the name of a service; None if nothing is."""
    if re.fullmatch(SERVICE_NAME, name):
        return None
    return f"expected up to 200 letters, digits and the signs _ . : / -, found {name!r:.100}"
