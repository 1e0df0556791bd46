"""Messages between a worker process and its parent, over a pipe."""

from __future__ import annotations

import os
from multiprocessing.connection import wait
from typing import Literal

import msgspec

from orchestrator.transport.codec import Attempt, prepare


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Child to parent: the process is ready. Announces its tasks and queues."""

    names: list[str]
    queues: list[str]
    unserved: list[str]
    """Queues of the application that the process does not serve, if no queues were chosen."""
    release: str = ""
    parameters: bytes = b""
    """The parameters of the process's tasks, encoded."""


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag="leaving"):
    """Child to parent: replace this process."""

    reason: str
    at_once: bool
    """Whether the process receives no more tasks already. Otherwise it works until its successor is ready."""
    is_last: bool = True
    """With `at_once`: whether the process ends in any case. Otherwise it can continue if there is no successor."""


class Command(msgspec.Struct, frozen=True, array_like=True, tag="command"):
    """Parent to child: a command."""

    verb: Literal["pause", "resume", "drain", "retire", "stay", "stop", "spare"]
    """`drain`: finish running tasks within the drain timeout. `retire`: finish them, however long it takes. `stay`:
    continue beyond the limit of tasks, because there is no successor."""
    stop: list[Attempt] = []
    """With `stop`: the attempts to stop."""
    moved: list[Attempt] = []
    """With `stop`: those of the attempts whose task continues in another attempt."""
    spare: list[Attempt] = []
    """With `spare`: the attempts to hand back if they have not begun."""


prepare(Command, Hello | Leaving)


class FirstToReport:
    """Lets one of several processes that fail alike report the error: the first to read the only byte of a pipe.

    The other processes wait until the first has ended. The parent then kills those that still load the application.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.write(self._writer, b"!")

    def take(self) -> bool:
        """Return whether this process is the first to report. If not, wait until the first has ended."""
        try:
            return os.read(self._reader, 1) != b""
        except BlockingIOError:  # the first process keeps its end of the pipe open until it ends
            os.close(self._writer)
            wait([self._reader])
            return False

    def close(self) -> None:
        """Close this process's ends of the pipe."""
        os.close(self._reader)
        os.close(self._writer)
