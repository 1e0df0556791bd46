"""`.orchestrator/services.json`: the addresses that a running `orchestrator dev` leaves for other commands."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

SERVICES_FILE = Path(".orchestrator") / "services.json"


def read_services_file(path: Path) -> dict[str, Any]:
    """Return what the file says; nothing if others could have written it."""
    if distrust(path) is not None:
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}  # it is being written, or a crash left half of it
    return {name: document[name] for name in ("database_url", "redis_url", "app") if document.get(name)}


def distrust(path: Path) -> str | None:
    """Return why a file is not trusted: users other than us and root own or can write it, or a folder above it."""
    for part, rights in ((path, 0o022), (path.parent, 0o022), (path.parent.parent, 0o002)):
        try:
            link, found = part.lstat(), part.stat()
        except OSError as error:
            return str(error)
        for owner in (link.st_uid, found.st_uid):
            if owner not in (os.geteuid(), 0):
                return f"{part} belongs to another user ({owner})"
        is_sticky = part == path.parent.parent and found.st_mode & stat.S_ISVTX  # like /tmp: nobody can replace ours
        if found.st_mode & rights and not is_sticky:
            return f"{part} can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def nearest_file(folder: Path, name: str) -> Path | None:
    """Return the first file of this name in a folder or one above it."""
    return next((path for parent in (folder, *folder.parents) if _is_file(path := parent / name)), None)


def _is_file(path: Path) -> bool:
    """Say whether there is such a file; a folder that we may not read has none."""
    try:
        return path.is_file()
    except PermissionError:  # before Python 3.14
        return False
