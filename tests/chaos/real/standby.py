"""A standby of Postgres, created when needed.

Once it is synchronous, it has every commit before the client's commit returns, so that a failover loses nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psycopg2

from orchestrator.embedded import EmbeddedPostgres

_TIMEOUT = 60.0
_FAST_SETTINGS = {"fsync": "off", "wal_retrieve_retry_interval": "100ms"}
"""Settings for fast starts. Only processes are killed, never the machine, so that data need not reach the disk."""


class Standby(EmbeddedPostgres):
    """A server with a copy of a primary's data, which follows the primary until `promote`."""

    def __init__(self, folder: Path, primary: EmbeddedPostgres) -> None:
        super().__init__(folder, _FAST_SETTINGS)
        self._primary = primary

    def follow(self, *, synchronous: bool = True) -> None:
        """Copy the primary, start, and wait until replication runs."""
        self.folder.mkdir(parents=True)
        command: list[str | Path] = [
            self._primary._binaries() / "pg_basebackup",
            "-d",
            self._primary.url,
            "-D",
            self.data,
        ]
        copied = [*command, "--write-recovery-conf", "--checkpoint=fast", "--no-sync"]
        subprocess.run(copied, check=True, capture_output=True)
        owner = self._primary.data.stat()
        for path in [self.data, *self.data.rglob("*")]:
            shutil.chown(path, owner.st_uid, owner.st_gid)
        if synchronous:  # before the start: from now on nothing commits without the standby
            ask(self._primary.url, "ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
        self.start()
        state = "sync" if synchronous else "async"
        self._wait(lambda: ask(self._primary.url, "SELECT sync_state FROM pg_stat_replication") == [(state,)])

    def fall_behind(self) -> None:
        """Stop receiving commits from the primary."""
        ask(self.url, "ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()")
        self._wait(lambda: ask(self._primary.url, "SELECT pid FROM pg_stat_replication") == [])

    def promote(self) -> None:
        """Become the primary; the old primary must be dead."""
        ask(self.url, "SELECT pg_promote()")
        self._wait(super()._ready)

    def _ready(self) -> bool:
        """Return whether the server accepts connections, be it a standby or a primary."""
        return super()._ready() or (self._pid_file.exists() and "standby" in self._pid_file.read_text(encoding="utf-8"))

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _TIMEOUT
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"a standby did not come so far in {_TIMEOUT:g} s; its log: {self.log}")
            time.sleep(0.02)


def ask(url: str, *statements: str) -> list[tuple[object, ...]]:
    """Run statements one by one; return the rows of the last one."""
    with closing(psycopg2.connect(url, connect_timeout=5)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return cursor.fetchall()
