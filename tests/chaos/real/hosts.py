"""A machine of its own for a process: a network namespace with one cable to ours, which can be pulled.

namespace ── veth ── our side, address 10.x.y.z/30: the wires of the processes there begin on it
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from functools import cache


class Host:
    """One namespace. Whether it may be made at all, `are_permitted` says."""

    def __init__(self, number: int) -> None:
        mark = f"{os.getpid() % 100_000:05}{number % 10}"
        self.name = f"chaos-{mark}"
        self._cable = f"chv{mark}a"
        network = f"10.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
        self.address = f"{network}.{4 * number + 1}"
        theirs, far_end = f"{network}.{4 * number + 2}", f"chv{mark}b"
        _ip("netns", "add", self.name)
        try:
            _ip("link", "add", self._cable, "type", "veth", "peer", "name", far_end, "netns", self.name)
            _ip("address", "add", f"{self.address}/30", "dev", self._cable)
            _ip("link", "set", self._cable, "up")
            _ip("-n", self.name, "address", "add", f"{theirs}/30", "dev", far_end)
            _ip("-n", self.name, "link", "set", far_end, "up")
        except subprocess.CalledProcessError:
            self.close()
            raise

    @property
    def prefix(self) -> list[str]:
        """Return what to put before a command to run it there; its process id is that of the command."""
        return ["ip", "netns", "exec", self.name]

    def pull_cable(self) -> None:
        """Lose every packet from now on, both ways; nobody is told."""
        _ip("link", "set", self._cable, "down")

    def plug_in(self) -> None:
        """Connect it again."""
        _ip("link", "set", self._cable, "up")

    def close(self) -> None:
        """Remove the namespace and its cable."""
        with suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self._cable)
        _ip("netns", "delete", self.name)


@cache
def are_permitted() -> bool:
    """Say whether this system lets us make hosts."""
    if shutil.which("ip") is None:
        return False
    try:
        Host(9).close()
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
