"""Where webhooks may go: the author of a workflow gives the address, and the operator of the workers allows it.

A worker is inside the network: it reaches databases, internal services and the cloud's metadata service, which trust
requests from there. So only public addresses are posted to, and those that the operator allows by name or network. What
counts is the address that a name was resolved to, and to which the connection is then made.
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
"""Ways to write an address of IPv4 as one of IPv6, with which a gateway may lead anywhere."""
_NEWER = tuple(map(ipaddress.IPv6Network, ("3fff::/20", "5f00::/16")))
"""For documentation and for segment routing; Python releases before 3.13 take them for public."""


@dataclass(frozen=True, kw_only=True)
class Destinations:
    """The addresses that the operator of a worker allows for webhooks."""

    mode: str
    """`public`, `allowed` or `off`, as the setting webhooks says."""
    hosts: tuple[str, ...] = ()
    """Names, or patterns such as *.corp, whatever they are resolved to."""
    networks: tuple[Network, ...] = ()

    def refusal(self, host: str, address: str) -> str | None:
        """Return why a host that was resolved to this address is not posted to; None where it may be."""
        found = parse_address(address)
        if self._is_allowed(host, found):
            return None
        if self.mode == "allowed":
            return f"{host} ({found}) is not among the hosts of the setting webhook_allow"
        return None if is_public(found) else f"{host} ({found}) is an internal address, and not in webhook_allow"

    def _is_allowed(self, host: str, address: Address) -> bool:
        name = host.lower().rstrip(".")
        by_name = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.hosts)
        return by_name or any(address in network for network in self.networks)


def parse_destinations(mode: str, allow: str) -> Destinations:
    """Read the settings webhooks and webhook_allow."""
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
    """Return an address as the system writes it; one of IPv4 that is written as IPv6 is what it is."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return found if mapped is None else mapped


def is_public(address: Address) -> bool:
    """Say whether an address is one of the whole world: none of a house, a machine, a cable, a cloud or a group."""
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
