"""Raise an exception in another thread. It arrives at that thread's next bytecode, not inside a blocking call."""

from __future__ import annotations

import ctypes


def interrupt_thread(thread: int, reason: type[BaseException]) -> None:
    """Raise `reason` in a thread."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(reason))


def uninterrupted(thread: int) -> None:
    """Take back an exception that has not arrived yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)
