"""The live screen: samples in the background, keys in the foreground, and the actions that keys start."""

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
from orchestrator.cli.top.view import Action, Sheet, View, press
from orchestrator.errors import OrchestratorError
from orchestrator.monitoring.times import between, duration, present, when
from orchestrator.sdk.app import Orchestrator
from orchestrator.settings import Settings
from orchestrator.store import insights, postgres_errors
from orchestrator.telemetry import first_line, has_colours

_REDRAW_INTERVAL = 1.0
"""Seconds after which the screen is redrawn without news, because the displayed ages grow."""


class Painter:
    """Converts rich text to terminal strings, with colors if the terminal has them."""

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
    """Shows the latest snapshot until the user quits."""

    def __init__(self, settings: Settings, interval: float, view: View) -> None:
        self._settings = settings
        self._sampler = Sampler(settings, interval)
        self._view = view
        self._painter = Painter()
        self._snapshot: Snapshot | None = None

    def run(self) -> None:
        """Take over the terminal until the user quits, then restore it."""
        self._snapshot = self._sampler.latest = self._sampler.sample_once()  # raises before the screen opens
        with Keyboard() as keyboard:
            self._sampler.start(keyboard.wake)
            try:
                self._loop(keyboard)
            except KeyboardInterrupt:
                return
            finally:
                self._sampler.stop()

    def _loop(self, keyboard: Keyboard) -> None:
        while True:
            if not self._view.frozen:
                self._snapshot = self._sampler.latest
            keyboard.show(self._painter.paint(self._lines(keyboard)))
            for key in keyboard.wait(_REDRAW_INTERVAL):
                action = press(self._view, key, self._snapshot) if self._snapshot is not None else None
                if action == Action("quit"):
                    return
                if action is not None:
                    threading.Thread(target=self._perform, args=(action, keyboard), name="deed", daemon=True).start()

    def _lines(self, keyboard: Keyboard) -> list[Text]:
        size = Size(keyboard.size.columns, keyboard.size.lines)
        return draw(self._snapshot, self._view, size, self._sampler.trouble, self._sampler.age)

    def _perform(self, action: Action, keyboard: Keyboard) -> None:
        """Perform an action in a thread, so that a server that hangs does not block the keyboard."""
        try:
            if action.verb in ("open", "open run"):
                lines = (task_lines if action.verb == "open" else run_lines)(self._settings, action.target)
                self._view.sheet = Sheet(lines[0], lines[1:])
            else:
                self._view.message = "…"
                self._view.message = self._send(action)
        except (*postgres_errors.UNAVAILABLE, OrchestratorError) as error:
            self._view.message = f"this failed: {first_line(error)}"
        keyboard.wake()

    def _send(self, action: Action) -> str:
        app = Orchestrator(replace(self._settings))
        try:
            if action.verb == "pause":
                app.queue(action.target).pause()
                return f"queue {action.target} is paused"
            if action.verb == "resume":
                app.queue(action.target).resume()
                return f"queue {action.target} is resumed"
            if action.verb == "cancel":
                app.handle(action.target).cancel()
                return f"asked to cancel task {action.target}"
            app.run(action.target).cancel()
            return f"asked to cancel run {action.target}"
        finally:
            app.close()


def task_lines(settings: Settings, task_id: str) -> list[str]:
    """Return a title and the details of a task."""
    with reading(settings) as connection:
        task_detail = insights.show_task(connection, UUID(task_id))
    if task_detail is None:
        return [f"Task {task_id}", "It is no longer kept."]
    now = present()
    lines = [
        f"Task {task_detail.name}",
        f"id        {task_detail.id}",
        f"call      {call_text(task_detail.name, task_detail.payload, task_detail.options)}",
        f"status    {task_detail.status}{f' ({task_detail.reason})' if task_detail.reason else ''}",
        f"queue     {task_detail.queue}, priority {task_detail.priority}",
        f"worker    {task_detail.worker or 'none yet'}",
        f"created   {when(task_detail.created_at, now)}",
        f"started   {when(task_detail.started_at, now) or 'not yet'}",
        f"took      {between(task_detail.started_at, task_detail.ended_at or now)}",
    ]
    if task_detail.run_id is not None:
        lines.append(f"run       {task_detail.run_id}")
    if task_detail.options:
        lines.append(f"options   {data_text(task_detail.options)}")
    if task_detail.result is not None:
        lines.append(f"result    {short_text(stored_value(task_detail.result, task_detail.options))}")
    for attempt in task_detail.attempts:
        took = between(attempt.started_at, attempt.ended_at or now)
        error_text = f": {attempt.error.kind}: {attempt.error.message}" if attempt.error else ""
        lines.append(f"attempt   {attempt.attempt} {attempt.outcome} after {took or 'nothing'}{error_text}")
    error = next((attempt.error for attempt in reversed(task_detail.attempts) if attempt.error), task_detail.error)
    if error is not None and error.traceback:
        lines += ["", *error.traceback.rstrip().split("\n")]
    return lines


def run_lines(settings: Settings, run_id: str) -> list[str]:
    """Return a title and the progress of a run."""
    with reading(settings) as connection:
        run_view = insights.show_run(connection, UUID(run_id))
        steps = insights.list_steps(connection, UUID(run_id)) if run_view is not None else []
    if run_view is None:
        return [f"Run {run_id}", "It is no longer kept."]
    now = present()
    lines = [
        f"Run {run_view.name}",
        f"id        {run_view.id}",
        f"status    {run_view.status}{f' ({run_view.reason})' if run_view.reason else ''}",
        f"workflow  {run_view.workflow or 'none'}{f', version {run_view.version}' if run_view.version else ''}",
        f"params    {data_text(hidden().redacted(insights.readable_params(run_view.params)))}",
        f"started   {when(run_view.started_at, now) or 'not yet'}",
        f"took      {between(run_view.began_at, run_view.ended_at or now)}",
        f"tasks     {run_view.total - run_view.open:,} of {run_view.total:,} ended, {run_view.failed:,} failed",
    ]
    if run_view.stuck:
        lines.append(f"stuck     {data_text(run_view.stuck)}")
    lines += ["", *(f"{step.state:<10} {step.name}" for step in steps)]
    return lines if steps else [*lines[:-1], f"open for  {duration((now - run_view.created_at).total_seconds())}"]


_OPEN = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""Enter the alternate screen, hide the cursor, disable line wrapping."""
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
    """Yield the names of pressed keys; unknown escape sequences are ignored."""
    for sequence in _SEQUENCE.findall(text):
        if sequence in _KEYS:
            yield _KEYS[sequence]
        elif len(sequence) == 1 and sequence.isprintable():
            yield sequence


class Keyboard:
    """A context manager that takes over the terminal. `wake` interrupts `wait` to redraw the screen."""

    def __init__(self) -> None:
        self._input, self._output = sys.stdin.fileno(), sys.stdout.fileno()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._before: dict[signal.Signals, Any] = {}
        self._displayed: list[str] = []
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
        self._is_open, self._displayed = True, []
        self._write(_OPEN)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            try:
                self._write(_CLOSE)
            finally:
                termios.tcsetattr(self._input, termios.TCSADRAIN, self._modes)

    def _on_resize(self, *_: object) -> None:
        self.wake()

    def _on_end(self, number: int, _: FrameType | None) -> None:
        """Let `wait` raise the exception: raised here, it could land in a finalizer, which would swallow it."""
        self._ending = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        self.wake()

    def _on_stop(self, *_: object) -> None:
        """Handle Ctrl-Z: restore the terminal, stop, and take it over again when the process continues."""
        self._close()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._open()
        self.wake()

    def wake(self) -> None:
        """Make `wait` return. Can be called from any thread."""
        try:
            os.write(self._writer, b"!")
        except BlockingIOError:
            return  # a wake-up is already pending

    def wait(self, seconds: float) -> list[str]:
        """Wait for keys or a wake-up; return the keys."""
        ready, _, _ = select.select([self._input, self._reader], [], [], seconds)
        if self._reader in ready:
            os.read(self._reader, 4096)
        if self._ending is not None:
            raise self._ending
        if self._input not in ready:
            return []
        typed = os.read(self._input, 4096)
        if not typed:
            sys.exit(0)  # the terminal is closed
        return list(keys_in(typed.decode("utf-8", "replace")))

    @property
    def size(self) -> os.terminal_size:
        return os.get_terminal_size(self._output)

    def show(self, lines: list[str]) -> None:
        """Show lines as wide as the screen. Only changed lines are written, so nothing flickers."""
        size = self.size
        parts = []
        if size != self._size:
            self._size, self._displayed = size, []
            parts.append("\x1b[0m\x1b[2J")
        for row, line in enumerate(lines):
            if row >= len(self._displayed) or self._displayed[row] != line:
                parts.append(f"\x1b[{row + 1};1H{line}\x1b[0m")
        if len(lines) < len(self._displayed):
            parts.append(f"\x1b[{len(lines) + 1};1H\x1b[J")
        self._displayed = lines
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
