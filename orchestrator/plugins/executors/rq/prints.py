"""What a worker of RQ calls for a task whose prints are wanted (option `prints`): such a fleet has this package.

The lines stand in the `meta` of the job when it ends, where the progress stands, too. RQ itself keeps no log.
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
"""Under which they stand there; `fleet.py` reads them."""
_MOST = 100_000
"""Characters that are kept, the last ones: every reader of the job reads its `meta`."""
_MOST_LINES = 1_000


class _Prints(io.TextIOBase):
    """Writes what it is given, and keeps the last of it."""

    def __init__(self, stream: TextIO, said: _Said) -> None:
        self._stream = stream
        self._said = said

    def write(self, text: str) -> int:
        """Write a text."""
        self._said.add(text)
        return self._stream.write(text)

    def flush(self) -> None:
        """Have it written."""
        self._stream.flush()

    def fileno(self) -> int:
        """Return the file of the stream."""
        return self._stream.fileno()


class _Said:
    def __init__(self) -> None:
        self._parts: deque[str] = deque()
        self._size = 0

    def add(self, text: str) -> None:
        self._parts.append(text[-_MOST:])
        self._size += len(self._parts[-1])
        while self._size > _MOST:
            self._size -= len(self._parts.popleft())

    @property
    def lines(self) -> list[str]:
        return "".join(self._parts).splitlines()[-_MOST_LINES:]


def call(function: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Call a function, and leave what it prints with the job, however it ends."""
    said = _Said()
    out, err = _Prints(sys.stdout, said), _Prints(sys.stderr, said)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            value = import_attribute(function)(*arguments, **keywords)
            return asyncio.run(value) if inspect.iscoroutine(value) else value
    finally:
        job = get_current_job()
        if said.lines and job is not None:
            job.meta[_LINES] = said.lines
            job.save_meta()  # type: ignore[no-untyped-call]
