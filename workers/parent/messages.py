"""Messages between a worker process and its parent, over the pipe between them."""

from __future__ import annotations

import os
from multiprocessing.connection import wait
from typing import Literal

import msgspec

from orchestrator.transport.codec import Attempt, prepare


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Child to parent: ready, and these are the tasks I know, and the queues I serve."""

    names: list[str]
    queues: list[str]
    unserved: list[str]
    """The other queues of the application, if none were chosen."""
    release: str = ""
    """The release of the application."""
    parameters: bytes = b""
    """The parameters of its tasks, encoded."""


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag="leaving"):
    """Child to parent: replace me."""

    reason: str
    at_once: bool
    """I take no more tasks already. Otherwise I go on until my successor is ready."""
    is_last: bool = True
    """With `at_once`: I end whatever happens. Otherwise I could go on, should there be no successor."""


class Command(msgspec.Struct, frozen=True, array_like=True, tag="command"):
    """Parent to child."""

    verb: Literal["pause", "resume", "drain", "retire", "stay", "stop", "spare"]
    """`drain`: finish what runs, up to the drain timeout. `retire`: the same, however long it takes. `stay`: there is
    no successor, so go on although you have run enough tasks."""
    stop: list[Attempt] = []
    """With `stop`: the attempts to end."""
    moved: list[Attempt] = []
    """Of these, the ones whose task goes on in another attempt."""
    spare: list[Attempt] = []
    """With `spare`: the attempts to give back if they have not begun."""


prepare(Command, Hello | Leaving)


class FirstToReport:
    """Of processes that are started together and fail alike, one says why: the one that reads the only byte of a pipe.

    The others end after it: with the first that ends, their parent kills those that still load the application.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.write(self._writer, b"!")

    def take(self) -> bool:
        """Say whether this process is the first to report; if not, return when that has ended."""
        try:
            return os.read(self._reader, 1) != b""
        except BlockingIOError:  # the first has its end of the pipe open until it ends
            os.close(self._writer)
            wait([self._reader])
            return False

    def close(self) -> None:
        """Leave the message to processes that were forked meanwhile, or have nothing to say."""
        os.close(self._reader)
        os.close(self._writer)
