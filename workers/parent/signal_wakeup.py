"""Wakes a waiting process when a signal arrives. Without it, Python would record the signal and continue to wait."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType


class SignalWakeup:
    """A file descriptor to wait for, which becomes readable when one of these signals arrives."""

    def __init__(self, handlers: dict[signal.Signals, Callable[[], None]]) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._numbers: list[signal.Signals] = []
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number, handler in handlers.items():
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started with nohup
            self._numbers.append(number)
            signal.signal(number, _handler(handler))

    def fileno(self) -> int:
        """Return the descriptor that becomes readable on a signal."""
        return self._reader

    def silence(self) -> None:
        """Drain the descriptor, so that it is unreadable until the next signal."""
        try:
            while os.read(self._reader, 512):
                pass
        except BlockingIOError:
            return

    def remove(self) -> None:
        """Restore the default signal handlers. Called in a child that was just forked."""
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
