"""A network namespace for a process, like a separate machine, with one virtual cable that can be pulled.

namespace ── veth ── our side, address 10.x.y.z/30, where the proxies for its processes listen
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from functools import cache


class Host:
    """A network namespace; `are_permitted` tells whether the system allows it."""

    def __init__(self, number: int) -> None:
        suffix = f"{os.getpid() % 100_000:05}{number % 10}"
        self.name = f"chaos-{suffix}"
        self._cable = f"chv{suffix}a"
        network = f"10.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
        self.address = f"{network}.{4 * number + 1}"
        far_address, far_end = f"{network}.{4 * number + 2}", f"chv{suffix}b"
        _ip("netns", "add", self.name)
        try:
            _ip("link", "add", self._cable, "type", "veth", "peer", "name", far_end, "netns", self.name)
            _ip("address", "add", f"{self.address}/30", "dev", self._cable)
            _ip("link", "set", self._cable, "up")
            _ip("-n", self.name, "address", "add", f"{far_address}/30", "dev", far_end)
            _ip("-n", self.name, "link", "set", far_end, "up")
        except subprocess.CalledProcessError:
            self.close()
            raise

    @property
    def prefix(self) -> list[str]:
        """The command prefix that runs a command in the namespace, with the command's own process id."""
        return ["ip", "netns", "exec", self.name]

    def pull_cable(self) -> None:
        """Lose every packet in both directions; connections stay open."""
        _ip("link", "set", self._cable, "down")

    def plug_in(self) -> None:
        _ip("link", "set", self._cable, "up")

    def close(self) -> None:
        """Remove the namespace and its cable."""
        with suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self._cable)
        _ip("netns", "delete", self.name)


@cache
def are_permitted() -> bool:
    """Return whether this system allows network namespaces."""
    if shutil.which("ip") is None:
        return False
    try:
        Host(9).close()
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
