"""Detects changed Python files, for `--reload`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_SCAN_INTERVAL = 0.5
"""Seconds between two scans."""
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages"}


class Changes:
    """Tracks the *.py files under a folder, except hidden folders and virtual environments."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = dict(self._scan())
        self.due_at = 0.0
        """When the next scan is due."""

    def poll(self, now: float | None = None) -> list[str]:
        """Return the files changed, added or removed since the last scan. With `now`, scan only if a scan is due."""
        if now is not None:
            if now < self.due_at:
                return []
            self.due_at = now + _SCAN_INTERVAL
        current = dict(self._scan())
        changed = [name for name, _ in self._seen.items() ^ current.items()]
        self._seen = current
        return sorted({os.path.relpath(name, self._folder) for name in changed})

    def _scan(self) -> Iterator[tuple[str, int]]:
        for folder, folders, files in os.walk(self._folder):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in _SKIPPED_FOLDERS]
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
