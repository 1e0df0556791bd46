"""The folder of a command's execution: its input, its output, and how it ended.

    input, spec.json    the input of the command
    stdout, stderr      its output; `told` is the offset up to which stderr was logged, `left_out` the bytes dropped
    keeper              its keeper: the line of /proc/PID/stat, which has the start time of that process
    end                 the exit code, written by the keeper as its last act

The keeper creates its file exclusively, so that the command is started once, however often that is tried.
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
from orchestrator.workers.reporting.lines import final_text

_MAX_AGE = 86_400
"""Seconds after which leftovers are deleted: no watcher has collected them for that long."""


_GROUP_FIELDS = slice(2, 4)
"""Fields of /proc/PID/stat with the process group and session, counted after the program's name."""


class Keeper(NamedTuple):
    """The keeper process of a command, the leader of its process group."""

    pid: int
    started: str
    """Start time as the kernel writes it. Distinguishes the keeper from a later process with the same pid."""

    def is_alive(self) -> bool:
        line = _stat(self.pid)
        return line is not None and _parse(line) == self and _state(line) not in "ZX"

    def left_behind(self) -> list[int]:
        """Return the remaining processes of a command whose keeper may have been killed.

        The kernel does not reuse the keeper's pid while one of them exists.
        """
        line = _stat(self.pid)
        if not self.pid or (line is not None and _parse(line) != self):
            return []
        pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
        return [pid for pid in pids if (line := _stat(pid)) is not None and self._owns(line)]

    def _owns(self, line: str) -> bool:
        fields = line.rpartition(")")[2].split()
        return str(self.pid) in fields[_GROUP_FIELDS] and fields[0] not in "ZX"

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the command."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


class Spool:
    def __init__(self, root: Path, name: str) -> None:
        self.folder = root / name
        self.stderr = self.folder / "stderr"
        self.stdout = self.folder / "stdout"
        self._offset: int | None = None
        self._ends_with_return = False
        """Whether the part that was read last ends with a carriage return."""
        self._progress_at = float("-inf")

    def prepare(self, input: bytes, specification: bytes) -> None:
        """Write the input of the command, and create its output files.

        The files are created in advance, because starting a process blocks all threads while it opens files.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        (self.folder / "work").mkdir(exist_ok=True)
        for name, data in (("input", input), ("spec.json", specification)):
            path = self.folder / f".{name}"
            path.write_bytes(data)
            path.replace(self.folder / name)
        for path in (self.stderr, self.stdout):
            path.touch(0o600)

    def grant_access(self, uid: int, gid: int) -> None:
        """Give another user access to run the command: to its working directory and its specification."""
        for folder in (self.folder.parent, self.folder):
            folder.chmod(0o711)
        for name in ("work", "spec.json"):
            os.chown(self.folder / name, uid, gid)

    def keeper(self) -> Keeper | None:
        """Return the keeper of the command, or None if it has not begun."""
        try:
            line = (self.folder / "keeper").read_text()
        except FileNotFoundError:
            return None
        return _parse(line) if line.endswith("\n") else None

    def forbid(self) -> bool:
        """Prevent a keeper from beginning. Return False if one has begun."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        try:
            with (self.folder / "keeper").open("x") as file:
                file.write(_NO_KEEPER)
        except FileExistsError:
            return False
        (self.folder / "end").touch()  # `sweep` goes by its age
        return True

    def exit_code(self) -> int | None:
        """Return the exit code of the command, or None if unknown."""
        try:
            text = (self.folder / "end").read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(text) if text.endswith("\n") and text.strip().isdigit() else None

    def has_more(self, until: int | None = None) -> bool:
        """Return whether stderr has unread data, or unread data before an offset."""
        size = _size(self.stderr)
        if size and size < self._read_offset():
            self._offset = 0  # the file was truncated meanwhile
        return (size if until is None else min(size, until)) > (self._read_offset() if size else 0)

    def needs_truncation(self) -> bool:
        """Return whether stderr is so large that it should be truncated."""
        return _size(self.stderr) > _MAX_STDERR

    def truncate(self) -> None:
        """Truncate stderr to zero bytes, and count its unread bytes as dropped.

        Bytes written between reading the size and truncating are not counted.
        """
        dropped_bytes = _size(self.stderr) - self._read_offset()
        with contextlib.suppress(FileNotFoundError):
            os.truncate(self.stderr, 0)  # the writer appends
            self._record_dropped(dropped_bytes, 0)

    def skip(self, end: int) -> None:
        """Skip unread stderr if there is very much, except its last bytes before `end`."""
        offset = end - _CHUNK
        if offset - self._read_offset() > _MAX_STDERR:
            self._record_dropped(offset - self._read_offset(), offset)

    def _record_dropped(self, size: int, offset: int) -> None:
        self._write_number("left_out", self.dropped_bytes() + max(0, size))
        self._offset = offset
        self._write_number("told", offset)

    def _write_number(self, name: str, number: int) -> None:
        """Write a number atomically: if the process is killed, the old number remains."""
        path = self.folder / f".{name}-{os.getpid()}"
        path.write_text(str(number))
        path.replace(self.folder / name)

    def dropped_bytes(self) -> int:
        """Return how many bytes of stderr were dropped, at least."""
        return _number(self.folder / "left_out")

    def stderr_size(self) -> int:
        """Return the size of stderr in bytes."""
        return _size(self.stderr)

    def has_written_more_than(self, limit: int) -> bool:
        """Return whether stdout has more than `limit` bytes."""
        return _size(self.stdout) > limit

    def new_lines(self, *, is_last: bool = False) -> str | None:
        """Return the unread lines of stderr as one text and advance the offset, or return None if there are none.

        The lines are a block of the file, and are not split here: lines dropped later cost nothing.
        """
        offset = self._read_offset()
        try:
            with self.stderr.open("rb") as file:
                file.seek(offset)
                data = file.read(_CHUNK)
        except FileNotFoundError:
            return None
        is_all = len(data) < _CHUNK
        if not data.endswith(b"\n") and not (is_last and is_all):
            data = data[: self._complete_size(data) or (0 if is_all else len(data))]
        if not data:
            return None
        self._offset = offset + len(data)
        self._write_number("told", self._offset)
        text = data.decode(errors="replace")
        if self._ends_with_return and text.startswith("\n"):  # ends a line that was read before
            if text == "\n":
                self._ends_with_return = False
                return self.new_lines(is_last=is_last)
            text = text.removeprefix("\n")
        self._ends_with_return = data.endswith(b"\r")
        return final_text(text.removesuffix("\n"))

    def _complete_size(self, data: bytes) -> int:
        """Return how many bytes are complete lines. A progress bar with carriage returns is one line a second."""
        ended, redrawn = data.rfind(b"\n") + 1, data.rfind(b"\r") + 1
        now = time.monotonic()
        if redrawn <= ended or now < self._progress_at + _PROGRESS_INTERVAL:
            return ended
        self._progress_at = now
        return redrawn

    def _read_offset(self) -> int:
        """Return the offset up to which stderr was read, by this watcher or an earlier one."""
        if self._offset is None:
            self._offset = _number(self.folder / "told")
        return self._offset

    def output(self, limit: int) -> bytes:
        """Return the content of stdout, up to `limit` bytes."""
        with self.stdout.open("rb") as file:
            return file.read(limit)

    def stderr_tail(self, size: int = 4_000) -> str:
        with contextlib.suppress(FileNotFoundError), self.stderr.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read().decode(errors="replace").strip()
        return ""

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


_CHUNK = 250_000
"""Bytes of stderr that are read at once."""
_MAX_STDERR = 16_000_000
"""Bytes of stderr on disk, above which it is truncated."""
_PROGRESS_INTERVAL = 1.0
"""Minimum seconds between two lines of a progress bar that is redrawn with carriage returns."""
_NO_KEEPER = "0 (nobody) X\n"
"""Content of the keeper file of a command that must not begin."""


def open_root(namespace: str) -> Path:
    """Return the folder of all executions of this machine and user. Raise an error if another user may write to it."""
    root = Path(tempfile.gettempdir()) / _root_name(namespace)
    root.mkdir(mode=0o700, exist_ok=True)
    if not _is_own(root):
        raise ConfigurationError(
            f"{root}: expected a folder of user {os.getuid()} that no other user may write to. Remove it, or set "
            f"TMPDIR to a folder of your own."
        )
    sweep(root)
    return root


def root_of(folder: str, name: str, namespace: str) -> Path | None:
    """Return the parent of an execution's folder, whose path another worker has stored; None if the path is invalid."""
    path = Path(folder)
    if path.name != name or path.parent.name != _root_name(namespace) or ".." in path.parts:
        return None
    try:
        return path.parent if _is_own(path.parent) else None
    except OSError:
        return path.parent  # the folder is unreachable


def _root_name(namespace: str) -> str:
    return f"orchestrator-executions-{os.getuid()}-{namespace}"


def _is_own(root: Path) -> bool:
    status = root.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def sweep(root: Path) -> None:
    """Delete folders of executions that ended long ago and whose watchers were killed.

    For a command whose keeper was killed, the last write to its folder counts as the end.
    """
    for folder in root.iterdir():
        with contextlib.suppress(OSError):
            spool, end = Spool(root, folder.name), folder / "end"
            paths = [end] if end.exists() else [folder, *folder.iterdir()]
            if time.time() - max(path.stat().st_mtime for path in paths) > _MAX_AGE:
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
