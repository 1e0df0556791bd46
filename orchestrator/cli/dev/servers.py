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
"""Seconds for which it counts that one has ended, and after which one that runs has started well."""
_LONGEST_PAUSE = 10.0


class Restarts:
    """When one that has ended is started again: at once, and after longer and longer pauses if it ends soon again."""

    def __init__(self) -> None:
        self._ended: dict[str, list[float]] = {}
        """When each has ended, lately."""
        self._due: dict[str, float] = {}
        """When those that have ended are started again."""

    def plan(self, name: str, how: str) -> None:
        """Plan to start one again, and say so."""
        now = time.monotonic()
        ended = self._ended[name] = [*(at for at in self._ended.get(name, ()) if at > now - LATELY), now]
        pause = min(2.0 ** (len(ended) - 2), _LONGEST_PAUSE) if len(ended) > 1 else 0.0
        again = f", {len(ended)} times within {LATELY:g} s: starting it again in {pause:g} s"
        say("dev", f"{how}{again if pause else ': starting it again'}", logging.WARNING)
        self._due[name] = now + pause

    def __contains__(self, name: str) -> bool:
        return name in self._due

    def take_due(self) -> list[str]:
        """Return those that are to be started now."""
        due = [name for name, at in self._due.items() if at <= time.monotonic()]
        for name in due:
            del self._due[name]
        return due


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
        self._restarts = Restarts()

    def look_after(self) -> bool:
        """Start again what has ended; False if that cannot be done."""
        for server in self._servers:
            if not server.running and server.title not in self._restarts:
                self._restarts.plan(server.title, f"{server.title} has ended")
        due = self._restarts.take_due()
        return all(self._start_again(server) for server in self._servers if server.title in due)

    def _start_again(self, server: Server) -> bool:
        if not server.folder.exists():
            say("dev", f"{server.title} has ended, and its folder {server.folder} is gone: giving up", logging.ERROR)
            return False
        try:
            server.start()
        except (OrchestratorError, OSError) as error:
            say("dev", f"{server.title} cannot be started again: {error}. Its log: {server.log}", logging.ERROR)
            return False
        return True
