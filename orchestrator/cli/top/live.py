"""The screen that lives: looks in the background, keys in front, and what is to be done about either."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any
from uuid import UUID

from rich.console import Console
from rich.text import Text

from orchestrator.cli.terminal.output import call_text, data_text, hidden, short_text, stored_value
from orchestrator.cli.terminal.reading import reading
from orchestrator.cli.top.frame import Size, draw
from orchestrator.cli.top.sampling import Sampler, Snapshot
from orchestrator.cli.top.view import Deed, Sheet, View, press
from orchestrator.errors import OrchestratorError
from orchestrator.monitoring.times import between, duration, present, when
from orchestrator.sdk.app import Orchestrator
from orchestrator.settings import Settings
from orchestrator.store import database, insights
from orchestrator.telemetry import first_line, has_colours

_AT_LEAST = 1.0
"""Seconds after which the screen is drawn again though nothing is new: the age of what is shown grows."""


class Painter:
    """Makes text of lines, with colours where they may be."""

    def __init__(self) -> None:
        colours = has_colours(sys.stdout)
        self._console = Console(
            file=io.StringIO(),
            force_terminal=colours,
            no_color=not colours,
            width=10_000,
            highlight=False,
            markup=False,
        )

    def paint(self, lines: list[Text]) -> list[str]:
        return [self._line(line) for line in lines]

    def _line(self, line: Text) -> str:
        with self._console.capture() as written:
            self._console.print(line, end="", no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)
        return written.get()


class Live:
    """Shows the latest look until somebody quits."""

    def __init__(self, settings: Settings, interval: float, view: View) -> None:
        self._settings = settings
        self._sampler = Sampler(settings, interval)
        self._view = view
        self._painter = Painter()
        self._found: Snapshot | None = None

    def run(self) -> None:
        """Take the terminal, and give it back at the end."""
        self._found = self._sampler.latest = self._sampler.look_once()  # its errors are reported as always
        with Keyboard() as keyboard:
            self._sampler.start(keyboard.ring)
            try:
                self._loop(keyboard)
            except KeyboardInterrupt:
                return
            finally:
                self._sampler.stop()

    def _loop(self, keyboard: Keyboard) -> None:
        while True:
            if not self._view.frozen:
                self._found = self._sampler.latest
            keyboard.show(self._painter.paint(self._lines(keyboard)))
            for key in keyboard.wait(_AT_LEAST):
                deed = press(self._view, key, self._found) if self._found is not None else None
                if deed == Deed("quit"):
                    return
                if deed is not None:
                    threading.Thread(target=self._do, args=(deed, keyboard), name="deed", daemon=True).start()

    def _lines(self, keyboard: Keyboard) -> list[Text]:
        size = Size(keyboard.size.columns, keyboard.size.lines)
        return draw(self._found, self._view, size, self._sampler.trouble, self._sampler.age)

    def _do(self, deed: Deed, keyboard: Keyboard) -> None:
        """Do something beyond the screen, in a thread: a server that hangs keeps nobody from quitting."""
        try:
            if deed.verb in ("open", "open run"):
                lines = (task_lines if deed.verb == "open" else run_lines)(self._settings, deed.target)
                self._view.sheet = Sheet(lines[0], lines[1:])
            else:
                self._view.said = "…"
                self._view.said = self._ask(deed)
        except (*database.UNAVAILABLE, OrchestratorError) as error:
            self._view.said = f"that did not work: {first_line(error)}"
        keyboard.ring()

    def _ask(self, deed: Deed) -> str:
        app = Orchestrator(replace(self._settings))
        try:
            if deed.verb == "pause":
                app.queue(deed.target).pause()
                return f"queue {deed.target} is paused"
            if deed.verb == "resume":
                app.queue(deed.target).resume()
                return f"queue {deed.target} goes on"
            if deed.verb == "cancel":
                app.handle(deed.target).cancel()
                return f"asked to cancel task {deed.target}"
            app.run(deed.target).cancel()
            return f"asked to cancel run {deed.target}"
        finally:
            app.close()


def task_lines(settings: Settings, task: str) -> list[str]:
    """Return a title, and all that is known of a task."""
    with reading(settings) as connection:
        found = insights.show_task(connection, UUID(task))
    if found is None:
        return [f"Task {task}", "It is no longer kept."]
    now = present()
    lines = [
        f"Task {found.name}",
        f"id        {found.id}",
        f"call      {call_text(found.name, found.payload, found.options)}",
        f"status    {found.status}{f' ({found.reason})' if found.reason else ''}",
        f"queue     {found.queue}, priority {found.priority}",
        f"worker    {found.worker or 'none yet'}",
        f"created   {when(found.created_at, now)}",
        f"started   {when(found.started_at, now) or 'not yet'}",
        f"took      {between(found.started_at, found.ended_at or now)}",
    ]
    if found.run_id is not None:
        lines.append(f"run       {found.run_id}")
    if found.options:
        lines.append(f"options   {data_text(found.options)}")
    if found.result is not None:
        lines.append(f"result    {short_text(stored_value(found.result, found.options))}")
    for attempt in found.attempts:
        took = between(attempt.started_at, attempt.ended_at or now)
        said = f": {attempt.error.kind}: {attempt.error.message}" if attempt.error else ""
        lines.append(f"attempt   {attempt.attempt} {attempt.outcome} after {took or 'nothing'}{said}")
    error = next((attempt.error for attempt in reversed(found.attempts) if attempt.error), found.error)
    if error is not None and error.traceback:
        lines += ["", *error.traceback.rstrip().split("\n")]
    return lines


def run_lines(settings: Settings, run: str) -> list[str]:
    """Return a title, and how far a run has come."""
    with reading(settings) as connection:
        found = insights.show_run(connection, UUID(run))
        steps = insights.list_steps(connection, UUID(run)) if found is not None else []
    if found is None:
        return [f"Run {run}", "It is no longer kept."]
    now = present()
    lines = [
        f"Run {found.name}",
        f"id        {found.id}",
        f"status    {found.status}{f' ({found.reason})' if found.reason else ''}",
        f"workflow  {found.workflow or 'none'}{f', version {found.version}' if found.version else ''}",
        f"params    {data_text(hidden().shown(insights.readable_params(found.params)))}",
        f"started   {when(found.started_at, now) or 'not yet'}",
        f"took      {between(found.began_at, found.ended_at or now)}",
        f"tasks     {found.total - found.open:,} of {found.total:,} ended, {found.failed:,} failed",
    ]
    if found.stuck:
        lines.append(f"stuck     {data_text(found.stuck)}")
    lines += ["", *(f"{step.state:<10} {step.name}" for step in steps)]
    return lines if steps else [*lines[:-1], f"open for  {duration((now - found.created_at).total_seconds())}"]


_OPEN = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""A screen of our own, without a cursor, that does not wrap lines."""
_CLOSE = "\x1b[?7h\x1b[?25h\x1b[0m\x1b[?1049l"
_KEYS = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[C": "right",
    "\x1b[D": "left",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1bOC": "right",
    "\x1bOD": "left",
    "\x1b[5~": "pageup",
    "\x1b[6~": "pagedown",
    "\x1b[H": "home",
    "\x1b[F": "end",
    "\x1b[1~": "home",
    "\x1b[4~": "end",
    "\x1b[Z": "backtab",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\t": "tab",
    "\x7f": "backspace",
    "\x08": "backspace",
    " ": "space",
}
_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|O.)|.", re.DOTALL)


def keys_in(text: str) -> Iterator[str]:
    """Yield the keys that were pressed, by name; those that have none here are left out."""
    for found in _SEQUENCE.findall(text):
        if found in _KEYS:
            yield _KEYS[found]
        elif len(found) == 1 and found.isprintable():
            yield found


class Keyboard:
    """Takes the terminal while it is entered. A change for the screen rings."""

    def __init__(self) -> None:
        self._input, self._output = sys.stdin.fileno(), sys.stdout.fileno()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._before: dict[signal.Signals, Any] = {}
        self._shown: list[str] = []
        self._size = os.terminal_size((0, 0))
        self._is_open = False
        self._ending: BaseException | None = None

    def __enter__(self) -> Keyboard:
        self._modes = termios.tcgetattr(self._input)
        for number, handler in (
            (signal.SIGWINCH, self._on_resize),
            (signal.SIGINT, self._on_end),
            (signal.SIGTERM, self._on_end),
            (signal.SIGHUP, self._on_end),
            (signal.SIGTSTP, self._on_stop),
        ):
            self._before[number] = signal.signal(number, handler)
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _open(self) -> None:
        tty.setcbreak(self._input)
        self._is_open, self._shown = True, []
        self._write(_OPEN)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            try:
                self._write(_CLOSE)
            finally:
                termios.tcsetattr(self._input, termios.TCSADRAIN, self._modes)

    def _on_resize(self, *_: object) -> None:
        self.ring()

    def _on_end(self, number: int, _: FrameType | None) -> None:
        """Have `wait` end: raised here, it might come in the middle of a finalizer, which would swallow it."""
        self._ending = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        self.ring()

    def _on_stop(self, *_: object) -> None:
        """Ctrl-Z: give the terminal back, and take it again when we go on."""
        self._close()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._open()
        self.ring()

    def ring(self) -> None:
        """Have `wait` return; from any thread."""
        try:
            os.write(self._writer, b"!")
        except BlockingIOError:
            return  # it rings already

    def wait(self, seconds: float) -> list[str]:
        """Wait for keys, or until somebody rings; return the keys."""
        ready, _, _ = select.select([self._input, self._reader], [], [], seconds)
        if self._reader in ready:
            os.read(self._reader, 4096)
        if self._ending is not None:
            raise self._ending
        if self._input not in ready:
            return []
        typed = os.read(self._input, 4096)
        if not typed:
            sys.exit(0)  # the terminal is gone
        return list(keys_in(typed.decode("utf-8", "replace")))

    @property
    def size(self) -> os.terminal_size:
        """How large the screen is now."""
        return os.get_terminal_size(self._output)

    def show(self, lines: list[str]) -> None:
        """Show lines as wide as the screen, of which only those are written that have changed: nothing flickers."""
        size = self.size
        parts = []
        if size != self._size:
            self._size, self._shown = size, []
            parts.append("\x1b[0m\x1b[2J")
        for row, line in enumerate(lines):
            if row >= len(self._shown) or self._shown[row] != line:
                parts.append(f"\x1b[{row + 1};1H{line}\x1b[0m")
        if len(lines) < len(self._shown):
            parts.append(f"\x1b[{len(lines) + 1};1H\x1b[J")
        self._shown = lines
        if parts:
            self._write("\x1b[?2026h" + "".join(parts) + "\x1b[?2026l")

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        while data:
            try:
                data = data[os.write(self._output, data) :]
            except InterruptedError:
                continue
            except BlockingIOError:
                select.select([], [self._output], [], 1.0)
