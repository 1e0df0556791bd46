"""The setting of an experiment: servers, processes, and a proxy between each process and each server."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg2
import psycopg2.extras
from redis import Redis

from orchestrator import Settings
from orchestrator.embedded import EmbeddedServices
from orchestrator.settings import load_settings
from orchestrator.store import database
from tests.chaos.real.clocks import Clock, RedisWithClock
from tests.chaos.real.hosts import Host
from tests.chaos.real.journal import Journal
from tests.chaos.real.members import Member
from tests.chaos.real.project.base import LOG
from tests.chaos.real.project.limits import work_at_rate
from tests.chaos.real.project.releases import OF_RELEASE
from tests.chaos.real.proxy import Proxies, Proxy
from tests.chaos.real.standby import Standby

IMPATIENT = {"worker_ttl": 3.0, "heartbeat": 0.5, "lease": 2.0, "drain_timeout": 3.0}
"""Settings with short timeouts, for which a fault of some seconds is long."""
_RESTART_INTERVAL = 0.1
_STARTS = f"""
CREATE SCHEMA chaos;
CREATE TABLE chaos.starts (task uuid NOT NULL, lane text, at timestamptz NOT NULL DEFAULT now());
CREATE FUNCTION chaos.write_down() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO chaos.starts (task, lane) VALUES (NEW.id, NEW.lane); RETURN NULL; END $$;
CREATE TRIGGER write_down AFTER UPDATE ON orchestrator.tasks FOR EACH ROW
  WHEN ((NEW.lane LIKE '{work_at_rate.name}|%' OR NEW.name LIKE '%{OF_RELEASE}%')
        AND OLD.status = 'pending' AND NEW.status = 'dispatched')
  EXECUTE FUNCTION chaos.write_down();
"""


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Arena:
    """Postgres, Redis, schedulers and workers within a `with` block."""

    def __init__(
        self,
        folder: Path,
        *,
        schedulers: int = 2,
        workers: int = 3,
        hosts: bool = False,
        clocks: bool = False,
        settings: Mapping[str, float] = IMPATIENT,
    ) -> None:
        self.folder = folder
        self.journal = Journal(folder)
        self.services = EmbeddedServices(folder / "services")
        self.schedulers: list[Member] = []
        self.workers: list[Member] = []
        self.apis: list[Member] = []
        self.api_port = _free_port()
        self._sizes = (schedulers, workers, hosts)
        self._has_clocks = clocks
        self._settings = settings
        self._proxies = Proxies()
        self._wires_to_postgres: list[Proxy] = []
        self._failovers = 0
        self._stack = ExitStack()
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.folder.mkdir(parents=True, exist_ok=True)
            if (clock := self._clock("redis")) is not None:
                self.services.redis = RedisWithClock(self.services.folder, clock)
            stack.enter_context(self.services)
            database.upgrade(self.services.database_url)
            self._write_down_starts()
            stack.enter_context(self._proxies)
            self.client_wires = (self._wire_to_redis(), self._wire_to_postgres())
            self._make_members(stack)
            stack.callback(self._kill_members)
            self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)
            self._keeper.start()
            stack.callback(self._stop_keeping)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def members(self) -> list[Member]:
        return [*self.schedulers, *self.workers, *self.apis]

    @property
    def settings(self) -> Settings:
        redis, postgres = self.client_wires
        return load_settings(
            folder=self.folder,
            environ={},
            redis_url=f"redis://127.0.0.1:{redis.port}/0",
            database_url=f"postgresql://postgres@127.0.0.1:{postgres.port}/orchestrator",
            **self._settings,
        )

    def leader(self) -> Member | None:
        """Return the member that holds the lease, or None."""
        with suppress(psycopg2.Error):
            for row in self.sql("SELECT address FROM orchestrator.leases WHERE expires_at > now()"):
                pid = int(row["address"].rpartition(":")[2])
                return next((member for member in self.schedulers if pid in member.pids), None)
        return None

    def sql(self, statement: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Run a statement on Postgres, without a proxy."""
        with (
            closing(psycopg2.connect(self.services.database_url, connect_timeout=5)) as connection,
            connection.cursor(cursor_factory=psycopg2.extras.RealDictCursor) as cursor,
        ):
            cursor.execute(statement, parameters)
            return [dict(row) for row in cursor.fetchall()]

    @contextmanager
    def redis(self) -> Iterator[Redis]:
        """Connect to Redis, without a proxy."""
        with Redis.from_url(self.services.redis_url, socket_timeout=5) as client:
            yield client

    def heal(self) -> None:
        """Heal every proxy and start the servers. All faults must have ended before."""
        for wire in self.wires():
            wire.heal()
        self.services.postgres.start()
        self.services.redis.start()

    def fail_over(self) -> None:
        """Kill Postgres, and promote a standby that has all its data."""
        primary = self.services.postgres
        self._failovers += 1
        standby = Standby(self.services.folder / f"standby-{self._failovers}", primary)
        try:
            standby.follow()
            primary.stop("immediate")
            standby.promote()
        except BaseException:
            standby.stop("immediate")
            raise
        self.services.postgres = standby
        for wire in self._wires_to_postgres:
            wire.redirect(self._postgres_socket())

    def wires(self) -> list[Proxy]:
        of_members = [wire for member in self.members for wire in (member.redis, member.postgres) if wire is not None]
        return [*of_members, *self.client_wires]

    def stop_members(self, timeout: float = 30.0) -> dict[str, int | None]:
        """Stop all processes gracefully, workers first; return their exit codes, None for a process that was killed."""
        exit_codes: dict[str, int | None] = {}
        for members in (self.apis, self.workers, self.schedulers):
            for member in members:
                member.ask_to_end()
            exit_codes |= {member.name: member.wait_for_end(timeout) for member in members}
        return exit_codes

    # -- setup

    def _write_down_starts(self) -> None:
        """Create a trigger that records dispatches of tasks that have a rate limit or that only one release knows."""
        with (
            closing(psycopg2.connect(self.services.database_url)) as connection,
            connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(_STARTS)

    def _make_members(self, stack: ExitStack) -> None:
        """Create the members. With hosts, the first scheduler and the first worker each get a host."""
        schedulers, workers, has_hosts = self._sizes
        hosts: list[Host] = []
        for number in range(2 if has_hosts else 0):
            hosts.append(Host(number))
            stack.callback(hosts[-1].close)
        for number in range(schedulers):
            host = hosts[0] if hosts and number == 0 else None
            wires = {"redis": self._wire_to_redis(host), "postgres": self._wire_to_postgres(host)}
            self.schedulers.append(self._member(f"scheduler-{number}", ["scheduler"], host=host, **wires))
        arguments = ["worker", "--app", "tests.chaos.real.project:app", "--processes", "2", "--concurrency", "5"]
        for number in range(workers):
            host = hosts[1] if hosts and number == 0 else None
            wire = self._wire_to_redis(host)
            self.workers.append(self._member(f"worker-{number}", arguments, host=host, redis=wire))
        wires = {"redis": self._wire_to_redis(), "postgres": self._wire_to_postgres()}
        self.apis.append(self._member("api-0", ["api", "--port", str(self.api_port)], **wires))

    def _member(self, name: str, arguments: list[str], **connections: Any) -> Member:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("ORCHESTRATOR_")}
        own = {f"ORCHESTRATOR_{key.upper()}": str(value) for key, value in self._settings.items()}
        environment = {**inherited, **own, LOG: str(self.journal.execution_log), "PYTHONUNBUFFERED": "1"}
        log, clock = self.folder / f"{name}.log", self._clock(name)
        return Member(name, arguments, environment, log, clock=clock, **connections)

    def _clock(self, name: str) -> Clock | None:
        return Clock(self.folder, name) if self._has_clocks else None

    def _wire_to_redis(self, host: Host | None = None) -> Proxy:
        return self._wire(Path(self.services.redis_url.removeprefix("unix://")), host)

    def _wire_to_postgres(self, host: Host | None = None) -> Proxy:
        self._wires_to_postgres.append(self._wire(self._postgres_socket(), host))
        return self._wires_to_postgres[-1]

    def _postgres_socket(self) -> Path:
        return Path(self.services.database_url.partition("?host=")[2]) / ".s.PGSQL.5432"

    def _wire(self, server: Path, host: Host | None) -> Proxy:
        return self._proxies.to(server, host.address if host is not None else "127.0.0.1")

    # -- restarting members

    def _keep(self) -> None:
        while not self._closing.wait(_RESTART_INTERVAL):
            for member in self.members:
                member.keep()

    def _stop_keeping(self) -> None:
        self._closing.set()
        self._keeper.join()

    def _kill_members(self) -> None:
        for member in self.members:
            member.ask_to_end()
            member.wait_for_end(0.0)
