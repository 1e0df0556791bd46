"""The Postgres and the Redis that `orchestrator dev` has started: one that has ended is started again."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from orchestrator.cli.dev.children import say
from orchestrator.errors import OrchestratorError

LATELY = 30.0
MOST_KILLED = 3
"""How often one may be killed within that many seconds, and be started again."""


class Server(Protocol):
    """A server that was started here."""

    title: str
    folder: Path
    log: Path

    @property
    def running(self) -> bool:
        """Say whether it is alive."""

    def start(self) -> None:
        """Start it, under the same URL as before."""


class Servers:
    """Restarts servers that have ended. Their clients wait for them to come back."""

    def __init__(self, servers: Iterable[Server]) -> None:
        self._servers = [server for server in servers if server.running]
        self._ended: dict[str, list[float]] = {}
        """When each was found to have ended, lately."""

    def look_after(self) -> bool:
        """Start again what has ended; False if that cannot be done, or was done too often."""
        return all(server.running or self._start_again(server) for server in self._servers)

    def _start_again(self, server: Server) -> bool:
        now = time.monotonic()
        title = server.title
        ended = self._ended[title] = [*(at for at in self._ended.get(title, ()) if at > now - LATELY), now]
        if len(ended) > MOST_KILLED:
            times = f"as {MOST_KILLED} times before within {LATELY:g} s"
            say("dev", f"{title} has ended, {times}: giving up. Its log: {server.log}", logging.ERROR)
            return False
        if not server.folder.exists():
            say("dev", f"{title} has ended, and its folder {server.folder} is gone: giving up", logging.ERROR)
            return False
        say("dev", f"{title} has ended: starting it again", logging.WARNING)
        try:
            server.start()
        except (OrchestratorError, OSError) as error:
            say("dev", f"{title} cannot be started again: {error}", logging.ERROR)
            return False
        return True
