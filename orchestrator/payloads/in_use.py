"""Distinguishes a folder that is not mounted from a new store: a store in use has a file that says so.

A mount point under which nothing is mounted is an empty folder, and so is a store before its first object. So the first
writer leaves a mark in the folder, and notes elsewhere that it did. A folder without its mark is a store that is away,
for all processes that have seen the mark, or find it noted: nothing is written there, and nothing counts as deleted.
The note may be lost; the next process that finds the mark notes it again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from orchestrator.errors import Unavailable

MARK = ".in-use"
"""The file."""


class Notes(Protocol):
    """Remembers, outside the stores, which are in use."""

    def has(self, place: str) -> bool:
        """Say whether a store was noted; raise `Unavailable` where that cannot be known now."""

    def note(self, place: str) -> None:
        """Note that a store is in use, if that can be done now."""


class InUseMarker:
    """The mark of one folder."""

    def __init__(self, root: Path, notes: Notes | None) -> None:
        self._root = root
        self._notes = notes
        self._seen = False

    def expect(self) -> None:
        """Return if the folder may be written to; leave the mark in one that is new. Raise `Unavailable` otherwise."""
        if self._is_there():
            return
        if self._seen or self._is_noted():
            raise self.away()
        self._leave()
        self._is_there()

    def is_missing(self) -> bool:
        """Say whether a folder in which something was not found is one that is not mounted."""
        if self._is_there():
            return False
        return self._seen or not any(self._root.iterdir()) or self._is_noted()

    def away(self) -> Unavailable:
        """Return why it cannot be used."""
        return Unavailable(
            f"The payload store {self._root} cannot be used: it was in use, and its file {MARK} is not there, so it is "
            f"probably not mounted. Mount it. If what it held is lost, and it is to begin anew, make that file."
        )

    def _is_there(self) -> bool:
        if not (self._root / MARK).exists():
            return False
        if not self._seen:
            self._seen = True
            if self._notes is not None:
                self._notes.note(str(self._root))
        return True

    def _is_noted(self) -> bool:
        return self._notes is not None and self._notes.has(str(self._root))

    def _leave(self) -> None:
        """Leave the mark, durably, before it is noted: a process that dies in between locks nobody out."""
        self._root.mkdir(parents=True, exist_ok=True)
        for path in (self._root / MARK, self._root):
            descriptor = os.open(path, os.O_RDONLY | (os.O_CREAT if path.name == MARK else 0), 0o644)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
