"""The folder of one execution of a command: its input, its output, and how it ended.

    input, spec.json    the input of the command
    stdout, stderr      its output; `told` is how far stderr has been passed on, and `left_out` how much was dropped
    keeper              its keeper: the line of /proc/PID/stat, with the time at which that process started
    end                 the exit code, written by the keeper as the last thing that it does

The keeper creates its file exclusively: the command is started once, however many have tried.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from orchestrator.errors import ConfigurationError
from orchestrator.workers.reporting.lines import as_it_stands

_OLD = 86_400
"""Seconds after which leftovers are deleted: their watcher died with the machine's other workers."""


_GROUP_AND_SESSION = slice(2, 4)
"""Where they stand in /proc/PID/stat, behind the name of the program."""


class Keeper(NamedTuple):
    """The process that keeps a command; the leader of its process group."""

    pid: int
    started: str
    """When it started, in the words of the kernel; so that another process with its number is not taken for it."""

    def is_alive(self) -> bool:
        line = _stat(self.pid)
        return line is not None and _parse(line) == self and _state(line) not in "ZX"

    def left_behind(self) -> list[int]:
        """Return the processes of the command, where it may have been killed without them.

        The system gives its number to nobody else while one of them is there.
        """
        line = _stat(self.pid)
        if not self.pid or (line is not None and _parse(line) != self):
            return []
        found = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
        return [pid for pid in found if (line := _stat(pid)) is not None and self._is_of(line)]

    def _is_of(self, line: str) -> bool:
        fields = line.rpartition(")")[2].split()
        return str(self.pid) in fields[_GROUP_AND_SESSION] and fields[0] not in "ZX"

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the command."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


class Spool:
    def __init__(self, root: Path, name: str) -> None:
        self.folder = root / name
        self.stderr = self.folder / "stderr"
        self.stdout = self.folder / "stdout"
        self._told: int | None = None
        self._is_returned = False
        """The part passed on last ends with a carriage return."""
        self._drawn_at = float("-inf")

    def prepare(self, input: bytes, specification: bytes) -> None:
        """Write the input of the command, and create the files into which it writes.

        Starting a process blocks all threads of this one while it opens its files, so none is left to be created.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        (self.folder / "work").mkdir(exist_ok=True)
        for name, data in (("input", input), ("spec.json", specification)):
            path = self.folder / f".{name}"
            path.write_bytes(data)
            path.replace(self.folder / name)
        for path in (self.stderr, self.stdout):
            path.touch(0o600)

    def hand_over(self, uid: int, gid: int) -> None:
        """Let another user run the command: the folder in which it runs, and its specification, are that user's."""
        for folder in (self.folder.parent, self.folder):
            folder.chmod(0o711)
        for name in ("work", "spec.json"):
            os.chown(self.folder / name, uid, gid)

    def keeper(self) -> Keeper | None:
        """Return the keeper of the command; None if there is none yet."""
        try:
            line = (self.folder / "keeper").read_text()
        except FileNotFoundError:
            return None
        return _parse(line) if line.endswith("\n") else None

    def forbid(self) -> bool:
        """Prevent a keeper from beginning; say whether that was in time."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        try:
            with (self.folder / "keeper").open("x") as file:
                file.write(_NOBODY)
        except FileExistsError:
            return False
        (self.folder / "end").touch()  # by whose age it is cleared away
        return True

    def exit_code(self) -> int | None:
        """Return how the command has ended; None if unknown."""
        try:
            said = (self.folder / "end").read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(said) if said.endswith("\n") and said.strip().isdigit() else None

    def has_more(self, until: int | None = None) -> bool:
        """Say whether stderr has something, or something before an offset, that was not passed on."""
        size = _size(self.stderr)
        if size and size < self._how_far():
            self._told = 0  # it was cut meanwhile
        return (size if until is None else min(size, until)) > (self._how_far() if size else 0)

    def has_much(self) -> bool:
        """Say whether stderr takes so much of the disk that it is to be cut."""
        return _size(self.stderr) > _MOST_SAID

    def cut(self) -> None:
        """Empty stderr, and count the bytes of it that were dropped.

        Bytes written between the look at its size and the cut are not counted.
        """
        left_out = _size(self.stderr) - self._how_far()
        with contextlib.suppress(FileNotFoundError):
            os.truncate(self.stderr, 0)  # the writer appends
            self._leave_out(left_out, 0)

    def skip(self, end: int) -> None:
        """Drop the unread part of stderr, but for its last bytes before `end`, if that is much."""
        place = end - _CHUNK
        if place - self._how_far() > _MOST_SAID:
            self._leave_out(place - self._how_far(), place)

    def _leave_out(self, size: int, place: int) -> None:
        self._write_number("left_out", self.left_out() + max(0, size))
        self._told = place
        self._write_number("told", place)

    def _write_number(self, name: str, number: int) -> None:
        """Write a number as a whole: a process that is killed in the middle leaves the number before."""
        path = self.folder / f".{name}-{os.getpid()}"
        path.write_text(str(number))
        path.replace(self.folder / name)

    def left_out(self) -> int:
        """Return how many bytes of stderr, at least, were dropped."""
        return _number(self.folder / "left_out")

    def said(self) -> int:
        """Return how many bytes there are in stderr."""
        return _size(self.stderr)

    def has_written_more_than(self, limit: int) -> bool:
        """Say whether there are more bytes in stdout."""
        return _size(self.stdout) > limit

    def new_lines(self, *, is_last: bool = False) -> str | None:
        """Return lines of stderr that were not passed on, as one text, and remember that they are; None: none.

        They are a block of the file, and not taken apart: lines that are dropped cost nothing.
        """
        place = self._how_far()
        try:
            with self.stderr.open("rb") as file:
                file.seek(place)
                data = file.read(_CHUNK)
        except FileNotFoundError:
            return None
        is_all = len(data) < _CHUNK
        if not data.endswith(b"\n") and not (is_last and is_all):
            data = data[: self._whole(data) or (0 if is_all else len(data))]
        if not data:
            return None
        self._told = place + len(data)
        self._write_number("told", self._told)
        text = data.decode(errors="replace")
        if self._is_returned and text.startswith("\n"):  # which ends a line that has been passed on
            if text == "\n":
                self._is_returned = False
                return self.new_lines(is_last=is_last)
            text = text.removeprefix("\n")
        self._is_returned = data.endswith(b"\r")
        return as_it_stands(text.removesuffix("\n"))

    def _whole(self, data: bytes) -> int:
        """Return how many bytes are lines that have ended; a bar that is drawn over is one, once a second."""
        ended, drawn = data.rfind(b"\n") + 1, data.rfind(b"\r") + 1
        now = time.monotonic()
        if drawn <= ended or now < self._drawn_at + _DRAWN_EVERY:
            return ended
        self._drawn_at = now
        return drawn

    def _how_far(self) -> int:
        """Return how many bytes of stderr have been passed on, by this watcher or one before it."""
        if self._told is None:
            self._told = _number(self.folder / "told")
        return self._told

    def output(self, limit: int) -> bytes:
        """Return what the command has written to stdout, up to `limit` bytes."""
        with self.stdout.open("rb") as file:
            return file.read(limit)

    def stderr_tail(self, size: int = 4_000) -> str:
        with contextlib.suppress(FileNotFoundError), self.stderr.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read().decode(errors="replace").strip()
        return ""

    def remove(self) -> None:
        """Clear everything away."""
        shutil.rmtree(self.folder, ignore_errors=True)


_CHUNK = 250_000
"""Bytes of stderr that are passed on at once."""
_MOST_SAID = 16_000_000
"""Bytes of stderr that stand on the disk."""
_DRAWN_EVERY = 1.0
"""Seconds between two lines that a bar becomes, which is drawn over with carriage returns."""
_NOBODY = "0 (nobody) X\n"
"""Stands in place of a keeper, of a command that must not begin."""


def open_root(namespace: str) -> Path:
    """Return the folder of all executions of this machine and user, if this user has made it."""
    root = Path(tempfile.gettempdir()) / _root_name(namespace)
    root.mkdir(mode=0o700, exist_ok=True)
    if not _is_own(root):
        raise ConfigurationError(
            f"{root}: expected a folder of user {os.getuid()} that nobody else may write to. Remove it, or set TMPDIR "
            f"to a folder of your own."
        )
    sweep(root)
    return root


def root_of(folder: str, name: str, namespace: str) -> Path | None:
    """Return the root of an execution's folder as another worker of this user has stored it; None if it is no such."""
    path = Path(folder)
    if path.name != name or path.parent.name != _root_name(namespace) or ".." in path.parts:
        return None
    try:
        return path.parent if _is_own(path.parent) else None
    except OSError:
        return path.parent  # it cannot be reached, and holds nothing


def _root_name(namespace: str) -> str:
    return f"orchestrator-executions-{os.getuid()}-{namespace}"


def _is_own(root: Path) -> bool:
    found = root.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def sweep(root: Path) -> None:
    """Clear away executions that ended long ago: their watchers were killed then.

    A command whose keeper was killed has no end; its last write counts.
    """
    for folder in root.iterdir():
        with contextlib.suppress(OSError):
            spool, end = Spool(root, folder.name), folder / "end"
            written = [end] if end.exists() else [folder, *folder.iterdir()]
            if time.time() - max(path.stat().st_mtime for path in written) > _OLD:
                keeper = spool.keeper()
                if end.exists() or keeper is None or not (keeper.is_alive() or keeper.left_behind()):
                    shutil.rmtree(folder, ignore_errors=True)


def _number(path: Path) -> int:
    try:
        return int(path.read_text() or 0)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _stat(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _parse(line: str) -> Keeper:
    head, _, rest = line.rpartition(")")
    fields = rest.split()
    return Keeper(int((head or line).split()[0]), fields[19] if len(fields) > 19 else "")


def _state(line: str) -> str:
    return line.rpartition(")")[2].split()[0]
