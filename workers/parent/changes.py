"""Which Python files have changed since the last look."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_EVERY = 0.5
"""Seconds between two looks."""
_FOREIGN = {"__pycache__", "node_modules", "site-packages"}


class Changes:
    """The *.py files under a folder, without hidden folders and virtual environments."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = dict(self._scan())
        self.due_at = 0.0
        """When the next look is due."""

    def poll(self, now: float | None = None) -> list[str]:
        """Return the files that were changed, added or removed since the last look; with `now`, if another is due."""
        if now is not None:
            if now < self.due_at:
                return []
            self.due_at = now + _EVERY
        found = dict(self._scan())
        changed = [name for name, _ in self._seen.items() ^ found.items()]
        self._seen = found
        return sorted({os.path.relpath(name, self._folder) for name in changed})

    def _scan(self) -> Iterator[tuple[str, int]]:
        for folder, folders, files in os.walk(self._folder):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in _FOREIGN]
            if "pyvenv.cfg" in files:
                folders.clear()
                continue
            for name in files:
                if name.endswith(".py") and not name.startswith("."):
                    path = os.path.join(folder, name)  # noqa: PTH118  (a Path for each file would cost more than the rest)
                    try:
                        yield path, os.stat(path).st_mtime_ns  # noqa: PTH116
                    except FileNotFoundError:
                        continue  # removed at this moment
