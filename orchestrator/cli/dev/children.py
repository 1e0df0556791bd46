"""Commands of ours as child processes, their output line by line with the role in front."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import click

from orchestrator.cli.dev import FOLLOW
from orchestrator.errors import OrchestratorError
from orchestrator.telemetry import get_logger, has_colours, is_watched
from orchestrator.terminal_safe import with_styles

_COLOURS = {"dev": "green", "scheduler": "magenta", "worker": "cyan", "schedules": "magenta"}
_WIDTH = max(map(len, _COLOURS))
_READY = re.compile(r"\b(api|scheduler|process)\.ready\b")
"""What a child logs once it has started: the API accepts requests, a scheduler or a process of a worker works."""
_HURRY = 3.0
"""Seconds that a child has left when its end is urgent."""


def say(role: str, text: str, level: int = logging.INFO) -> None:
    get_logger(role).log(level, "%s", text)


class Console(logging.Handler):
    """Where all parts speak: line by line, with the role in front; JSON, which names its logger, as it is.

    If the terminal is gone, the work goes on without it.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self._is_json = form == "json"
        self._colours = has_colours(sys.stdout)

    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).split("\n"):
            self._show(record.name.rpartition(".")[2], line)

    def pass_on(self, role: str, line: str) -> None:
        """Show a line of a child; what is no JSON among JSON becomes it."""
        if self._is_json and not line.startswith("{"):
            say(role, line, logging.ERROR if line.startswith("Error: ") else logging.INFO)
        else:
            self._show(role, line)

    def _show(self, role: str, line: str) -> None:
        front = "" if self._is_json else f"{click.style(role.ljust(_WIDTH), fg=_COLOURS.get(role))} │ "
        with suppress(OSError):
            click.echo(front + with_styles(line), color=self._colours)


class Child:
    """One command, in a session of its own: the terminal's Ctrl-C reaches only its parent, which stops it in order."""

    def __init__(
        self, role: str, arguments: Sequence[str], environment: Mapping[str, str], pass_on: Callable[[str, str], None]
    ) -> None:
        self.role = role
        self.is_ready = threading.Event()
        """Set when it has said that it has started."""
        self.started_at = time.monotonic()
        self._pass_on = pass_on
        watched = {"FORCE_COLOR": "1"} if is_watched(sys.stdout) else {}
        # -P: a file of the user's folder that is called like a module of the standard library must not replace it
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "orchestrator", *arguments],
            env={**os.environ, **watched, **environment, "PYTHONUNBUFFERED": "1", FOLLOW: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self._relay = threading.Thread(target=self._read, name=f"output of {role}", daemon=True)
        self._relay.start()

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll()

    def stop(self, timeout: float, urgent: threading.Event) -> None:
        """Ask it to drain and wait for its end. When that is urgent, ask again; if it takes too long, kill it."""
        self._process.terminate()
        deadline = time.monotonic() + timeout
        asked_again = False
        while self.exit_code is None:
            if urgent.is_set() and not asked_again:
                asked_again = True
                self._process.terminate()
                deadline = time.monotonic() + _HURRY
            if time.monotonic() > deadline:
                say("dev", f"killing the {self.role}")
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # with the processes that it has forked
                self._process.wait()
            time.sleep(0.02)
        self._relay.join(2.0)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if _READY.search(line):
                    self.is_ready.set()
                self._pass_on(self.role, line.rstrip("\n"))


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
