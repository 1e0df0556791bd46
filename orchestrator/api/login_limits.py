"""Wrong keys, counted by address in bounded memory. An address with too many is refused for a while."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from functools import lru_cache

_PERIOD = 60.0
"""Seconds after which an address begins anew."""
_TRIES = 20
"""Wrong keys of one address within that time."""
_MOST_ADDRESSES = 10_000


class LoginLimits:
    """Addresses from which wrong keys came lately, the one that began first in front."""

    def __init__(self) -> None:
        self._tries: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def wait(self, address: str) -> float:
        """Return for how many seconds no key of this address is looked at."""
        began, count = self._tries.get(neighbourhood(address), (0.0, 0))
        return max(0.0, began + _PERIOD - time.monotonic()) if count >= _TRIES else 0.0

    def note(self, address: str) -> None:
        """Count a wrong key."""
        now = time.monotonic()
        while self._tries and (
            next(iter(self._tries.values()))[0] <= now - _PERIOD or len(self._tries) >= _MOST_ADDRESSES
        ):
            self._tries.popitem(last=False)
        near = neighbourhood(address)
        began, count = self._tries.get(near, (now, 0))
        self._tries[near] = began, count + 1


@lru_cache(10_000)
def neighbourhood(address: str) -> str:
    """Return what stands for an address: one host has a whole /64 of IPv6 to itself."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address[:50]
    if isinstance(found, ipaddress.IPv4Address):
        return address
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))
