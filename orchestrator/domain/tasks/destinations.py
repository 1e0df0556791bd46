"""The addresses that webhooks may be sent to.

Workflow authors choose the URL, but a worker runs inside the network: it reaches databases, internal services and the
cloud's metadata service, which trust its requests. So webhooks go only to public addresses, and to hosts and networks
that the operator of the workers allows. The check applies to the resolved address that the connection uses.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from orchestrator.errors import ConfigurationError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_HOST = re.compile(r"(\*\.)?[\w-]+(\.[\w-]+)*\.?")
_TRANSLATED = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96")))
"""IPv6 ranges that embed IPv4 addresses. A gateway may route them anywhere."""
_NEWER = tuple(map(ipaddress.IPv6Network, ("3fff::/20", "5f00::/16")))
"""Ranges for documentation and segment routing. Python releases before 3.13 classify them as public."""


@dataclass(frozen=True, kw_only=True)
class Destinations:
    """The addresses that the operator of a worker allows for webhooks."""

    mode: str
    """`public`, `allowed` or `off`: the setting `webhooks`."""
    hosts: tuple[str, ...] = ()
    """Host names, or patterns such as *.corp, allowed whatever they resolve to."""
    networks: tuple[Network, ...] = ()

    def refusal(self, host: str, address: str) -> str | None:
        """Return why a webhook to a host with this resolved address is refused, or None if it is allowed."""
        resolved = parse_address(address)
        if self._is_allowed(host, resolved):
            return None
        if self.mode == "allowed":
            return f"{host} ({resolved}) is not among the hosts of the setting webhook_allow"
        return None if is_public(resolved) else f"{host} ({resolved}) is an internal address, and not in webhook_allow"

    def _is_allowed(self, host: str, address: Address) -> bool:
        name = host.lower().rstrip(".")
        by_name = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.hosts)
        return by_name or any(address in network for network in self.networks)


def parse_destinations(mode: str, allow: str) -> Destinations:
    """Parse the settings `webhooks` and `webhook_allow`."""
    hosts: list[str] = []
    networks: list[Network] = []
    for entry in filter(None, re.split(r"[,\s]+", allow)):
        try:
            networks.append(ipaddress.ip_network(entry, strict=False))
        except ValueError:
            if not _HOST.fullmatch(entry):
                raise ConfigurationError(
                    f"Setting webhook_allow: expected names of hosts, patterns such as *.corp, addresses or networks "
                    f"such as 10.1.0.0/16, separated by commas; found {entry!r}."
                ) from None
            hosts.append(entry.lower().rstrip("."))
    return Destinations(mode=mode, hosts=tuple(hosts), networks=tuple(networks))


def parse_address(address: str) -> Address:
    """Parse an address from the operating system. An IPv4-mapped IPv6 address is returned as IPv4."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return parsed if mapped is None else mapped


def is_public(address: Address) -> bool:
    """Return whether an address is publicly routable: not private, local, reserved or multicast."""
    if isinstance(address, IPv6Address) and (
        address.is_site_local or any(address in network for network in (*_TRANSLATED, *_NEWER))
    ):
        return False
    return address.is_global and not (
        address.is_multicast
        or address.is_reserved
        or address.is_loopback
        or address.is_link_local
        or address.is_private
        or address.is_unspecified
    )
