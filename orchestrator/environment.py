"""Keep what the environment of a process holds from others of the same user.

Linux shows every process's first environment to all programs of its user, in /proc/PID/environ: addresses with
passwords, signing keys, whatever else a service was started with. So a process that stays moves its variables
elsewhere, where it and what it starts find them as before, and blanks what the system shows. Programs of the same user
could still look into its memory: where it runs some that others chose, it forbids that too.
"""

from __future__ import annotations

import ctypes
import json
import os
import stat
from pathlib import Path
from typing import Any

PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")
"""Variables that are no secret: commands of tasks are given them."""

_LIBRARIES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONPATH")
"""Variables that say where programs find what they are made of."""

_STAT = Path("/proc/self/stat")
_BOUNDS = slice(47, 49)
"""Where the environment begins and ends, among the fields of that file that follow the name of the program."""
_SET_DUMPABLE = 4


def hide_environment() -> None:
    """Let nobody read the variables of this process from outside, but for a few; called before it has threads."""
    try:
        start, end = map(int, _STAT.read_text().rpartition(")")[2].split()[_BOUNDS])
    except (OSError, ValueError):
        return  # no Linux
    if not start < end:
        return  # it may not know where they are
    for name, value in os.environb.items():
        os.putenv(name, value)  # a copy; what stood there is used by nobody any more
    shown = ctypes.string_at(start, end - start)
    kept = tuple(f"{name}=".encode() for name in PASSED_ON)
    blank = b"\0".join(one if one.startswith(kept) else b"\0" * len(one) for one in shown.split(b"\0"))
    ctypes.memmove(start, blank, len(shown))


def bare_environment() -> dict[str, str]:
    """Return the variables that a server needs to start, and none that may be secret."""
    return {name: os.environ[name] for name in (*PASSED_ON, *_LIBRARIES) if name in os.environ}


def forbid_inspection(forbidden: bool = True) -> None:
    """Let no program of the same user read the memory of this process, nor trace it; there are no core dumps either."""
    library = ctypes.CDLL(None)
    if hasattr(library, "prctl"):
        library.prctl(_SET_DUMPABLE, int(not forbidden), 0, 0, 0)


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
