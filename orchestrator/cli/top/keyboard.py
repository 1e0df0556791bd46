"""The terminal while a program has all of it: its own screen, no echo, keys one by one. Given back whatever happens."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from types import FrameType
from typing import Any

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
