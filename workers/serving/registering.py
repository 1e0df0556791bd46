"""Registers the services of this process, and sends heartbeats with its load."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from orchestrator.errors import OrchestratorError
from orchestrator.sdk.remote.http import Broken, Http, Reply, Unreached
from orchestrator.settings import Settings
from orchestrator.telemetry import get_logger

log = get_logger("service")

_EVERY = 5.0
"""Seconds between two heartbeats; three of them may be lost."""
_TIMEOUT = 5.0
_PLAIN = re.compile(r"[A-Za-z0-9_.:-]{1,200}")
"""Names that every release of the registry takes."""


class Registration:
    """Registers in a thread of its own, and again whenever the registry has forgotten."""

    def __init__(
        self, settings: Settings, id: str, url: str, services: Sequence[str], load: Callable[[], float]
    ) -> None:
        self._http = Http(settings)
        self._id = id
        self._url = url
        self._services = list(services)
        self._load = load
        self._over = threading.Event()
        self._is_known = False
        self._has_failed = False
        self._is_refused = False
        """The registry did not understand the last message."""
        self._thread = threading.Thread(target=self._run, name="registering", daemon=True)

    def begin(self) -> None:
        """Begin to register."""
        self._thread.start()

    def end(self) -> None:
        """Leave: nothing more is asked for here."""
        self._over.set()
        self._thread.join(2 * _TIMEOUT)
        if self._is_known:
            self._ask("register", services=[])
        self._http.close()

    def _run(self) -> None:
        while not self._over.is_set():
            if self._is_known:
                self._is_known = self._ask("heartbeat")
            if not self._is_known and not self._over.is_set():
                self._is_known = self._register()
            self._over.wait(_EVERY)

    def _register(self) -> bool:
        """Register what is served; one name that a registry of an earlier release refuses keeps no other out."""
        if self._ask("register", services=self._services):
            return True
        plain = [name for name in self._services if _PLAIN.fullmatch(name)]
        if not self._is_refused or plain == self._services:
            return False
        log.warning("service.registered_in_part tasks=%d names=%s", len(plain), ",".join(plain))
        return self._ask("register", services=plain)

    def _post(self, path: str, body: bytes) -> Reply:
        """Send something, once more over a new connection where the registry has closed one that was idle."""
        try:
            return self._http.post(path, body, _TIMEOUT)
        except Broken:
            return self._http.post(path, body, _TIMEOUT)  # to say it twice changes nothing

    def _ask(self, what: str, **more: Any) -> bool:
        """Send a message; False if it was not taken. The first of several failures is logged."""
        body = {"id": self._id, "url": self._url, "load": self._load(), **more}
        try:
            reply = self._post(f"/workers/{what}", msgspec.json.encode(body))
            problem = "" if reply.status == 200 else f"{reply.status}: {reply.body[:300].decode('utf-8', 'replace')}"
            is_forgotten = reply.status == 404
            self._is_refused = reply.status == 422
        except (Unreached, Broken, OrchestratorError) as error:
            problem, is_forgotten = str(error), False
        if problem and not is_forgotten and not self._has_failed:
            log.warning(
                "service.not_registered url=%s call=%s error=%s: it is tried again", self._http.url, what, problem
            )
        elif not problem and (self._has_failed or (what == "register" and self._services == more.get("services"))):
            log.info("service.registered url=%s id=%s", self._http.url, self._id)
        self._has_failed = bool(problem) and not is_forgotten
        if problem and not is_forgotten and what == "heartbeat":
            return True  # it is known there, for all we know
        return not problem
