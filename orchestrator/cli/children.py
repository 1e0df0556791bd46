"""Commands of ours as child processes, their output line by line with the role in front."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import click

from orchestrator.cli.parent import FOLLOW
from orchestrator.harmless import with_styles

_COLOURS = {"dev": "green", "scheduler": "magenta", "worker": "cyan", "schedules": "magenta"}
_WIDTH = max(map(len, _COLOURS))
_HURRY = 3.0
"""Seconds that a child has left when its end is urgent."""


def say(role: str, text: str) -> None:
    """Print a line of one role. If the terminal is gone, the work goes on without it."""
    with suppress(OSError):
        click.echo(f"{click.style(role.ljust(_WIDTH), fg=_COLOURS[role])} │ {with_styles(text)}")


class Child:
    """One command, in a session of its own: the terminal's Ctrl-C reaches only its parent, who stops it in order."""

    def __init__(self, role: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.role = role
        # -P: a file of the user's folder that is called like a module of the standard library must not replace it
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "orchestrator", *arguments],
            env={**os.environ, **environment, "PYTHONUNBUFFERED": "1", FOLLOW: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self._relay = threading.Thread(target=self._pass_on, name=f"output of {role}", daemon=True)
        self._relay.start()

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll()

    def stop(self, patience: float, urgent: threading.Event) -> None:
        """Ask it to drain and wait for its end. When that is urgent, ask again; if it takes too long, kill it."""
        self._process.terminate()
        deadline = time.monotonic() + patience
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

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                say(self.role, line.rstrip("\n"))
