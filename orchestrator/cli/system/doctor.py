"""`orchestrator doctor`."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

import click
from redis.exceptions import RedisError
from sqlalchemy import Connection

import orchestrator
from orchestrator.cli.system.status import read_status
from orchestrator.cli.terminal.options import json_option
from orchestrator.cli.terminal.output import echo, print_json
from orchestrator.cli.terminal.reading import open_calls
from orchestrator.domain.quotas import parse_quotas
from orchestrator.domain.tasks.destinations import parse_destinations
from orchestrator.errors import ConfigurationError, OrchestratorError, SchemaError
from orchestrator.monitoring import trouble
from orchestrator.monitoring.listener import parse_address
from orchestrator.monitoring.times import counted, duration
from orchestrator.secret_keys import service_keys
from orchestrator.settings import Settings, load_settings, misspelt
from orchestrator.store import compatibility, database, postgres_errors
from orchestrator.store.compatibility import OLDEST_POSTGRES
from orchestrator.store.insights import RunFilter, server
from orchestrator.store.insights.server import connections
from orchestrator.terminal_safe import one_line, without_password
from orchestrator.transport.connection import check_server
from orchestrator.transport.inspection import connected_shards, inspect_all, live_workers, refused_commands

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_TIMEOUT = 5.0
"""Seconds that a server may take for each answer."""
_SAMPLES = 10
_MAX_COUNTED = 100
_SLOW_ANSWER, _SLOW_COMMIT = 0.005, 0.020
"""Thresholds in seconds: a tick sends about ten statements and one commit, and an enqueue waits for a commit."""
_CLOCK_SKEW = 1.0
_LOW_DISK, _FULL_DISK = 1_000_000_000, 64_000_000
_PREVENT_WORK = ("redis away", "redis full", "redis refuses writes", "redis evicts", "foreign key")
"""Problems of `status` that fail the check. Missing processes only warn, except the scheduler while tasks are open."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    check: str
    """The name of the check; programs may rely on it."""
    level: str
    """`ok`, `warn` or `fail`."""
    found: str
    """The observed state or problem."""
    change: str = ""
    """What to change, unless `found` says so."""


_REDIS_ADDRESS = "Check host and port. A URL with rediss:// is of a server with TLS, redis:// of one without."


def _ok(check: str, found: str) -> Finding:
    return Finding(check=check, level="ok", found=found)


def _warn(check: str, found: str, change: str = "") -> Finding:
    return Finding(check=check, level="warn", found=found, change=change)


def _fail(check: str, found: str, change: str = "") -> Finding:
    return Finding(check=check, level="fail", found=found, change=change)


@click.command("doctor")
@json_option
def command(as_json: bool) -> None:
    """Check settings, servers and processes from this machine, and say what to change.

    Each line is `ok`, `warn` (it works, but not as well or as safely as it could) or `fail` (it cannot work). Any
    failure exits with 1. Servers that the settings do not name are not checked: on a worker, that is Postgres.

    \b
    Example:
      orchestrator doctor
      orchestrator doctor --json | jq '.checks[] | select(.level != "ok")'
    """
    findings = []
    for finding in _examine():
        findings.append(finding)
        if not as_json:
            echo(f"{finding.level:5}", colour=_COLOURS[finding.level], nl=False)
            echo(one_line(f"{finding.check:20} {finding.found} {finding.change}".rstrip()))
    is_well = all(finding.level != "fail" for finding in findings)
    if as_json:
        print_json({"ok": is_well, "checks": findings})
    sys.exit(not is_well)


def _examine() -> Iterator[Finding]:
    release = f"orchestrator {orchestrator.__version__}, Python {platform.python_version()}"
    yield _ok("release", f"{release}, {platform.system()} {platform.machine()}")
    try:
        settings = load_settings()
    except ConfigurationError as error:
        yield _fail("settings", str(error))
        return
    yield from _settings(settings)
    yield from _disk(settings)
    if settings.redis_url:
        yield from _guarded("redis", _redis(settings))
    if settings.database_url:
        yield from _guarded("postgres", _postgres(settings))
    if settings.read_database_url:
        yield from _guarded("read replica", _replica(settings))
    if settings.database_url or settings.api_url:
        yield from _guarded("system", _system(settings))


def _guarded(check: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield findings until an error, which becomes a failure."""
    try:
        yield from findings
    except (OrchestratorError, RedisError) as error:
        yield _fail(check, str(error))
    except postgres_errors.UNAVAILABLE as error:
        yield _fail(check, f"Postgres cannot be used: {postgres_errors.explain(error)}")


def _settings(settings: Settings) -> Iterator[Finding]:
    for remark in misspelt(os.environ):
        yield _warn("settings", remark)
    urls = {name: getattr(settings, name) for name in ("database_url", "redis_url", "api_url")}
    found = ", ".join(f"{name} {without_password(value)}" for name, value in urls.items() if value)
    if not found:
        needed = "Set ORCHESTRATOR_DATABASE_URL and ORCHESTRATOR_REDIS_URL; a worker needs only the latter."
        yield _fail("settings", "no server is named.", needed)
    elif settings.database_url and not settings.redis_url:
        needed = "Set ORCHESTRATOR_REDIS_URL: tasks reach workers through Redis."
        yield _fail("settings", "database_url is set, redis_url is not.", needed)
    elif problems := [*_misread(settings)]:
        yield from problems
    else:
        yield _ok("settings", f"{found}, namespace {settings.namespace}")


def _misread(settings: Settings) -> Iterator[Finding]:
    """Yield settings that this process does not use, and that stop a process that reads them."""
    readers: list[Callable[[], object]] = [
        lambda: parse_address(settings.metrics or "0"),
        lambda: parse_destinations(settings.webhooks, settings.webhook_allow),
        lambda: service_keys(settings.service_keys, settings.service_keys_file),
        lambda: parse_quotas(word for word in settings.api_quotas.split(",") if word.strip()),
    ]
    if find_spec("starlette") is not None:
        from orchestrator.api.proxies import Proxies

        readers.append(lambda: Proxies(settings))
    for read in readers:
        try:
            read()
        except ConfigurationError as error:
            yield _fail("settings", str(error))


def _disk(settings: Settings) -> Iterator[Finding]:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    grade = _fail if free < _FULL_DISK else _warn
    found = f"{free / 1e9:,.1f} GB free in {folder}"
    yield _ok("disk", found) if free >= _LOW_DISK else grade("disk", f"{found}.", "Make room.")
    if not (settings.database_url or settings.api_url):  # otherwise `_system` checks the payload store
        yield from map(_problem, trouble.of_payload_store(settings.payload_store))


def _redis(settings: Settings) -> Iterator[Finding]:
    with connected_shards(settings, _TIMEOUT) as shards:
        redis, keys = shards[0]
        health, _ = inspect_all(shards, None, ())
        if not (settings.database_url or settings.api_url):
            yield from map(_problem, trouble.of_redis(health))
        if not health.reachable:
            yield _fail("redis", f"{health.error}.", _REDIS_ADDRESS)
            return
        for server in dict.fromkeys(server for server, _ in shards):
            check_server(server)
        limit = f" of {health.max_memory / 1e6:,.1f}" if health.max_memory else ""
        memory = f"{health.used_memory / 1e6:,.1f}{limit} MB used, maxmemory-policy {health.eviction}"
        yield _ok("redis", f"{health.server} {health.version}, {memory}")
        if refused := refused_commands(redis, keys):
            found = f"the user of redis_url may not use {', '.join(refused)}."
            rights = f"~{keys.prefix}:* &{keys.prefix}:* +@all -@admin -@dangerous +info"
            yield _fail("redis permissions", found, f"Allow it: ACL SETUSER name {rights}")
        else:
            yield _ok("redis permissions", "streams, scripts and channels can be used")
        yield _speed("redis latency", redis.ping, _SLOW_ANSWER, "Run Redis nearer to this machine.")
        yield _clock("redis clock", lambda: _seconds(*redis.time()))
        live = sum(live_workers(*shard) for shard in shards)
        yield _ok("heartbeats", f"{live} live worker processes")


def _seconds(seconds: int, microseconds: int) -> float:
    return seconds + microseconds / 1e6


def _postgres(settings: Settings) -> Iterator[Finding]:
    engine = database.probe_engine(settings, "orchestrator doctor", _TIMEOUT)
    try:
        with engine.connect() as connection:
            found = server.server(connection)
            yield from _postgres_server(found)
            if found.number < OLDEST_POSTGRES * 10_000:
                return
            yield _schema(connection)
            yield from _rights(found, settings)
            yield _pooler(connection)
            used = connections(connection)
            yield _ok(
                "connections", f"{used.used} of {used.limit} open"
            )  # exhausted connections are reported by `_system`
            advice = "Run Postgres nearer to this machine."
            yield _speed("postgres latency", lambda: server.clock(connection), _SLOW_ANSWER, advice)
            if not found.read_only:
                advice = "Give Postgres a faster disk, or a synchronous standby that is nearer."
                yield _speed("postgres commit", lambda: server.commit(connection), _SLOW_COMMIT, advice)
            yield _clock("postgres clock", lambda: server.clock(connection))
    finally:
        engine.dispose()


def _replica(settings: Settings) -> Iterator[Finding]:
    of_replica = replace(settings, database_url=settings.read_database_url)
    engine = database.probe_engine(of_replica, "orchestrator doctor", _TIMEOUT)
    try:
        with engine.connect() as connection:
            found = server.replayed(connection)
            if found.position is None:
                yield _fail("read replica", "it is a primary.", "Name a standby in read_database_url.")
            else:
                yield _ok("read replica", f"a standby, whose last commit is {duration(found.age)} old")
    finally:
        engine.dispose()


def _postgres_server(found: server.Server) -> Iterator[Finding]:
    if found.number < OLDEST_POSTGRES * 10_000:
        yield _fail("postgres", f"Postgres {found.version}.", f"Use Postgres {OLDEST_POSTGRES} or newer.")
    elif found.read_only:
        yield _fail("postgres", f"Postgres {found.version} is read-only.", "Name the primary in database_url.")
    else:
        yield _ok("postgres", f"Postgres {found.version}")
    if found.unsafe:
        lost = "A crash of its machine may lose tasks that were enqueued: turn them on."
        yield _warn("durability", f"Off: {', '.join(found.unsafe)}.", lost)
    else:
        yield _ok("durability", "commits are flushed to disk")


def _schema(connection: Connection) -> Finding:
    """Check the schema, as `db check` does."""
    try:
        newer = database.check_schema(connection)
    except SchemaError as error:
        return _fail("schema", str(error))
    return _warn("schema", newer) if newer else _ok("schema", f"revision {database.REVISION}, as this release needs it")


def _rights(found: server.Server, settings: Settings) -> Iterator[Finding]:
    if found.forbidden:
        grant = f'GRANT ALL ON ALL TABLES IN SCHEMA "{settings.namespace}" TO "{found.role}"'
        tables = ", ".join(found.forbidden)
        yield _fail("permissions", f"the role {found.role} may not read and write {tables}.", f"Allow it: {grant}")
    elif not found.owns:
        upgrades = (
            "Let the owner run `orchestrator db upgrade`, and let schedulers use that role: they create and drop."
        )
        yield _warn("permissions", f"the role {found.role} does not own the tables.", upgrades)
    else:
        yield _ok("permissions", f"the role {found.role} owns the tables")
    if misplaced := server.misplaced_tables(settings.require_database(), settings.namespace):
        yield _warn("search path", misplaced)


def _pooler(connection: Connection) -> Finding:
    if not compatibility.is_pooled(connection):
        return _ok("pooler", "none: this is a direct connection")
    direct = "Programs and the API may use it; give schedulers a direct connection."
    return _warn("pooler", "connections to Postgres go through a pooler.", direct)


def _system(settings: Settings) -> Iterator[Finding]:
    """Report the leader, the workers and all problems that `status` finds."""
    with open_calls() as calls:
        status = read_status(calls, settings)
        unreplayed = []
        if settings.database_url:  # an older API does not know this filter
            unreplayed = calls.insights.page_of_runs(RunFilter(unreplayed=True), limit=_MAX_COUNTED, before=None).runs
    leader, standbys = status.overview.leader, status.overview.standbys
    if leader is not None:
        found = f"{leader.address} leads"
        if standbys is None:
            yield _ok("scheduler", f"{found}; without Redis, the number of standbys is unknown")
        elif standbys:
            yield _ok("scheduler", f"{found}, {len(standbys)} standing by")
        else:
            yield _warn("scheduler", f"{found}, without a standby.", "Start a second scheduler on another machine.")
    if leader is None or not status.overview.hears_workers:
        yield _ok("workers", f"unknown while no scheduler {'leads' if leader is None else 'hears them'}")
    elif status.overview.workers:
        yield _ok("workers", f"{status.overview.workers} live, {status.overview.slots} slots")
    else:
        yield _warn("workers", "none.", "Start: orchestrator worker")
    has_open = any(status.overview.open.values())
    yield from (_problem(found, is_failure=has_open and found.kind == "no leader") for found in status.troubles)
    if unreplayed:
        count = f"{'at least ' if len(unreplayed) == _MAX_COUNTED else ''}{counted(len(unreplayed), 'open run')}"
        have = "has" if len(unreplayed) == 1 else "have"
        change = "Find those that do not match the code: orchestrator workflows replay-check --app module:app"
        yield _warn("code runs", f"{count} {have} not been replayed by the workers that are live now.", change)


def _problem(found: trouble.Trouble, *, is_failure: bool = False) -> Finding:
    grade = _fail if is_failure or found.kind in _PREVENT_WORK else _warn
    return grade(found.kind, found.message)


def _speed(check: str, operation: Callable[[], object], slow: float, change: str) -> Finding:
    """Run an operation a few times, and grade its median duration."""
    durations = []
    for _ in range(_SAMPLES):
        started = time.perf_counter()
        operation()
        durations.append(time.perf_counter() - started)
    median = statistics.median(durations)
    found = f"p50 {duration(median)}, slowest {duration(max(durations))} of {_SAMPLES}"
    return _ok(check, found) if median < slow else _warn(check, f"{found}; under {duration(slow)} is usual.", change)


def _clock(check: str, read_clock: Callable[[], float]) -> Finding:
    """Compare a server's clock with the middle of the request, by this machine's clock."""
    started = time.time()
    server_time = read_clock()
    ahead = server_time - (started + time.time()) / 2
    found = f"{duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} this machine"
    if abs(ahead) < _CLOCK_SKEW:
        return _ok(check, found)
    return _warn(check, f"{found}.", "Synchronize both with NTP: otherwise times in arguments and logs disagree.")
