"""Wakes a process that waits when a signal arrives. Without it, Python would take note and go on waiting."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType


class SignalWakeup:
    """Rings, as something to wait for beside pipes and sockets, whenever one of these signals arrives."""

    def __init__(self, handlers: dict[signal.Signals, Callable[[], None]]) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._numbers: list[signal.Signals] = []
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number, handler in handlers.items():
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup
            self._numbers.append(number)
            signal.signal(number, _handler(handler))

    def fileno(self) -> int:
        """Return what becomes readable when it rings."""
        return self._reader

    def silence(self) -> None:
        """Make it ring no more until the next signal."""
        try:
            while os.read(self._reader, 512):
                pass
        except BlockingIOError:
            return

    def remove(self) -> None:
        """Let signals do again what they do by default; for a child that was just forked."""
        signal.set_wakeup_fd(-1)
        for number in self._numbers:
            signal.signal(number, signal.SIG_DFL)
        os.close(self._reader)
        os.close(self._writer)


def _handler(handle: Callable[[], None]) -> Callable[[int, FrameType | None], None]:
    def on_signal(number: int, frame: FrameType | None) -> None:
        del number, frame
        handle()

    return on_signal
