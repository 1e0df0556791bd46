"""Protects the environment variables of a process from other processes of the same user.

On Linux, all programs of a user can read the initial environment of the user's processes in /proc/PID/environ,
including passwords and signing keys. So a long-running process copies its variables, and overwrites the memory that the
system shows. Programs of the same user could still read the process's memory, so a process that runs programs chosen by
others forbids that, too.
"""

from __future__ import annotations

import ctypes
import json
import os
import stat
from pathlib import Path
from typing import Any

INHERITED_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")
"""Variables without secrets, which are passed on to commands of tasks."""

_LIBRARIES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONPATH")
"""Variables that tell programs where to find their libraries."""

_STAT = Path("/proc/self/stat")
_BOUNDS = slice(47, 49)
"""The fields with the start and end address of the environment, counted after the program's name."""
_SET_DUMPABLE = 4


def hide_environment() -> None:
    """Overwrite the variables that others can read, except harmless ones. Call it before starting threads."""
    try:
        start, end = map(int, _STAT.read_text().rpartition(")")[2].split()[_BOUNDS])
    except (OSError, ValueError):
        return  # not Linux
    if not start < end:
        return  # the addresses are unknown
    for name, value in os.environb.items():
        os.putenv(name, value)  # makes a copy, so that the original is no longer used
    visible = ctypes.string_at(start, end - start)
    kept = tuple(f"{name}=".encode() for name in INHERITED_VARIABLES)
    blank = b"\0".join(entry if entry.startswith(kept) else b"\0" * len(entry) for entry in visible.split(b"\0"))
    ctypes.memmove(start, blank, len(visible))


def bare_environment() -> dict[str, str]:
    """Return the variables that a server needs to start, without secrets."""
    return {name: os.environ[name] for name in (*INHERITED_VARIABLES, *_LIBRARIES) if name in os.environ}


def forbid_inspection(forbidden: bool = True) -> None:
    """Forbid programs of the same user to read or trace this process. This also disables core dumps."""
    library = ctypes.CDLL(None)
    if hasattr(library, "prctl"):
        library.prctl(_SET_DUMPABLE, int(not forbidden), 0, 0, 0)


SERVICES_FILE = Path(".orchestrator") / "services.json"


def read_services_file(path: Path) -> dict[str, Any]:
    """Return the content of the file. Empty if other users could have written it."""
    if distrust(path) is not None:
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}  # incomplete: it is being written, or the writer crashed
    return {name: document[name] for name in ("database_url", "redis_url", "app") if document.get(name)}


def distrust(path: Path) -> str | None:
    """Return why a file is not trusted: other users own or can write it or its folder. None if it is trusted."""
    for part, rights in ((path, 0o022), (path.parent, 0o022), (path.parent.parent, 0o002)):
        try:
            link, target = part.lstat(), part.stat()
        except OSError as error:
            return str(error)
        for owner in (link.st_uid, target.st_uid):
            if owner not in (os.geteuid(), 0):
                return f"{part} belongs to another user ({owner})"
        is_sticky = part == path.parent.parent and target.st_mode & stat.S_ISVTX  # as /tmp: ours cannot be replaced
        if target.st_mode & rights and not is_sticky:
            return f"{part} can be written by others (mode {stat.S_IMODE(target.st_mode):o})"
    return None


def nearest_file(folder: Path, name: str) -> Path | None:
    """Return the first file of this name in a folder or its parents."""
    return next((path for parent in (folder, *folder.parents) if _is_file(path := parent / name)), None)


def _is_file(path: Path) -> bool:
    """Return whether a file exists. False in folders that this process may not read."""
    try:
        return path.is_file()
    except PermissionError:  # before Python 3.14
        return False
