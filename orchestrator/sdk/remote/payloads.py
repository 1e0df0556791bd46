"""Stored payloads over HTTP: the API reads the store, and sends one part after the other."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import IO

from orchestrator.payloads.objects import Reader, assembled
from orchestrator.references import Reference
from orchestrator.sdk.calls.tasks import PayloadPart, TaskCalls


class RemotePayloads:
    """Reads what references name from an API."""

    def __init__(self, tasks: TaskCalls) -> None:
        self._tasks = tasks

    def encoded(self, reference: Reference) -> bytes:
        """Return the value as encoded data."""
        parts = _Parts(self._tasks, reference)
        if reference.item is not None:
            return parts.chunk(0)
        return assembled(reference, parts.each())

    def open(self, reference: Reference) -> IO[bytes]:
        """Return stored bytes as a file."""
        return io.BufferedReader(Reader(_Parts(self._tasks, reference)))


class _Parts:
    def __init__(self, tasks: TaskCalls, reference: Reference) -> None:
        self._tasks = tasks
        self._reference = reference
        self._first: PayloadPart | None = self._ask(0)
        self.chunks = self._first.parts

    def _ask(self, number: int) -> PayloadPart:
        return self._tasks.payload_part(self._reference.task, self._reference.encoded(), number)

    def chunk(self, number: int) -> bytes:
        """Return one part."""
        if number == 0 and self._first is not None:
            first, self._first = self._first, None
            return first.data
        return self._ask(number).data

    def each(self) -> Iterator[bytes]:
        """Yield all parts."""
        return map(self.chunk, range(self.chunks))

    def close(self) -> None:
        """There is nothing open."""
