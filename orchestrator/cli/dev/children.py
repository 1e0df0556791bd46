"""Child processes that run orchestrator commands; each line of output is prefixed with the child's role."""

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
"""Log line of a child that has started: the API accepts requests, or a scheduler or worker process is ready."""
_URGENT_TIMEOUT = 3.0
"""Seconds that a child gets to end after an urgent stop."""


def say(role: str, text: str, level: int = logging.INFO) -> None:
    get_logger(role).log(level, "%s", text)


class Console(logging.Handler):
    """Prints the lines of all parts, prefixed with the role; with JSON logs, unchanged.

    A closed terminal is ignored: the work continues without output.
    """

    def __init__(self, log_format: str) -> None:
        super().__init__()
        self._is_json = log_format == "json"
        self._colours = has_colours(sys.stdout)

    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).split("\n"):
            self._show(record.name.rpartition(".")[2], line)

    def pass_on(self, role: str, line: str) -> None:
        """Print a line of a child. If logs are JSON, other lines are logged as JSON."""
        if self._is_json and not line.startswith("{"):
            say(role, line, logging.ERROR if line.startswith("Error: ") else logging.INFO)
        else:
            self._show(role, line)

    def _show(self, role: str, line: str) -> None:
        prefix = "" if self._is_json else f"{click.style(role.ljust(_WIDTH), fg=_COLOURS.get(role))} │ "
        with suppress(OSError):
            click.echo(prefix + with_styles(line), color=self._colours)


class Child:
    """One child process in its own session: the terminal's Ctrl-C reaches only the parent, which stops it in order."""

    def __init__(
        self, role: str, arguments: Sequence[str], environment: Mapping[str, str], pass_on: Callable[[str, str], None]
    ) -> None:
        self.role = role
        self.is_ready = threading.Event()
        """Set when the child has logged that it is ready."""
        self.started_at = time.monotonic()
        self._pass_on = pass_on
        watched = {"FORCE_COLOR": "1"} if is_watched(sys.stdout) else {}
        # -P: a file in the user's folder must not shadow a module of the standard library
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
        """The exit code; None while the child runs."""
        return self._process.poll()

    def stop(self, timeout: float, urgent: threading.Event) -> None:
        """Ask the child to drain, and wait for its end. If that gets urgent, ask again; after the timeout, kill it."""
        self._process.terminate()
        deadline = time.monotonic() + timeout
        is_urgent_sent = False
        while self.exit_code is None:
            if urgent.is_set() and not is_urgent_sent:
                is_urgent_sent = True
                self._process.terminate()
                deadline = time.monotonic() + _URGENT_TIMEOUT
            if time.monotonic() > deadline:
                say("dev", f"killing the {self.role}")
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # including the processes that it has forked
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


RESTART_WINDOW = 30.0
"""Seconds during which an earlier end delays a restart, and after which a running child counts as started."""
_MAX_PAUSE = 10.0


class Restarts:
    """Plans restarts: at once, or after a growing pause if the process ended recently."""

    def __init__(self) -> None:
        self._ended: dict[str, list[float]] = {}
        """Monotonic times of the recent ends, by name."""
        self._due: dict[str, float] = {}
        """Monotonic times of the planned restarts, by name."""

    def plan(self, name: str, how: str) -> None:
        """Plan a restart and log it. `how` says how the process ended."""
        now = time.monotonic()
        ended = self._ended[name] = [*(at for at in self._ended.get(name, ()) if at > now - RESTART_WINDOW), now]
        pause = min(2.0 ** (len(ended) - 2), _MAX_PAUSE) if len(ended) > 1 else 0.0
        when = f", {len(ended)} times within {RESTART_WINDOW:g} s: restarting it in {pause:g} s"
        say("dev", f"{how}{when if pause else ': restarting it'}", logging.WARNING)
        self._due[name] = now + pause

    def __contains__(self, name: str) -> bool:
        return name in self._due

    def take_due(self) -> list[str]:
        due = [name for name, at in self._due.items() if at <= time.monotonic()]
        for name in due:
            del self._due[name]
        return due


class Server(Protocol):
    """An embedded server that this process has started."""

    title: str
    folder: Path
    log: Path

    @property
    def running(self) -> bool:
        """Return whether the server's process is alive."""

    def start(self) -> None:
        """Start the server again under the same URL."""


class Servers:
    """Restarts embedded servers that have ended. Clients wait for them to come back."""

    def __init__(self, servers: Iterable[Server]) -> None:
        self._servers = [server for server in servers if server.running]
        self._restarts = Restarts()

    def restart_ended(self) -> bool:
        """Restart the servers that have ended. Return False if one cannot be restarted."""
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
