"""The wrapper that RQ workers call for tasks with option `prints`. The fleet needs this package installed.

At the end of a job, its printed lines are stored in its `meta`, like its progress. RQ itself keeps no log.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rq import get_current_job
from rq.utils import import_attribute

_LINES = "orchestrator_lines"
"""The key of the lines in `meta`. `fleet.py` reads it."""
_MAX_CHARACTERS = 100_000
"""Characters kept, from the end: every reader of a job reads its `meta`."""
_MAX_LINES = 1_000


class _CapturingStream(io.TextIOBase):
    """A stream that writes text through, and keeps the last of it."""

    def __init__(self, stream: TextIO, tail: _Tail) -> None:
        self._stream = stream
        self._tail = tail

    def write(self, text: str) -> int:
        """Write a text, and keep it."""
        self._tail.add(text)
        return self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def fileno(self) -> int:
        """Return the file descriptor of the stream."""
        return self._stream.fileno()


class _Tail:
    def __init__(self) -> None:
        self._parts: deque[str] = deque()
        self._size = 0

    def add(self, text: str) -> None:
        self._parts.append(text[-_MAX_CHARACTERS:])
        self._size += len(self._parts[-1])
        while self._size > _MAX_CHARACTERS:
            self._size -= len(self._parts.popleft())

    @property
    def lines(self) -> list[str]:
        return "".join(self._parts).splitlines()[-_MAX_LINES:]


def call(function: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Call a function, and store its printed lines in the job, however it ends."""
    tail = _Tail()
    out, err = _CapturingStream(sys.stdout, tail), _CapturingStream(sys.stderr, tail)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            value = import_attribute(function)(*arguments, **keywords)
            return asyncio.run(value) if inspect.iscoroutine(value) else value
    finally:
        job = get_current_job()
        if tail.lines and job is not None:
            job.meta[_LINES] = tail.lines
            job.save_meta()  # type: ignore[no-untyped-call]
