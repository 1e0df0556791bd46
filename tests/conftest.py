"""Real Postgres and Redis for the whole session; a fresh database for every module."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import settings
from redis import Redis

from orchestrator.embedded import EmbeddedServices
from orchestrator.store import database
from tests import exits
from tests.connections import KEPT, cache_redis_version
from tests.databases import administering, new_database

# nohup ignores these signals, and child processes would inherit that and never stop: restore the defaults.
for _number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)

# The 5 s timeout of httpx fails tests on a slow machine.
for _part in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _part, 60.0)

# Each new httpx client reads all certificates (30 ms), and many tests create one client per request.
httpx._transports.default.create_ssl_context = functools.cache(httpx._transports.default.create_ssl_context)  # type: ignore[attr-defined]

# The same examples in every run: a failure belongs to the commit under test.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("quick", settings.get_profile("repeatable"), max_examples=15)  # scripts/test --quick
settings.load_profile("repeatable")

cache_redis_version()

# Child processes of tests import `tests/startup`.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent / "startup"), os.environ.get("PYTHONPATH")])
)

gc.disable()  # loaded modules and collected tests stay in memory; see pytest_collection_finish


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark a test `long` if its parameters include an id of its `long_for` marker."""
    for item in items:
        ids = item.callspec.id.split("-") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else []
        if any(set(ids) & set(marker.args) for marker in item.iter_markers("long_for")):
            item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """Exclude everything loaded so far from garbage collection, and enable collection."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    yield
    exits.check()


@pytest.fixture(scope="session")
def services() -> Iterator[EmbeddedServices]:
    """Postgres and Redis, with a temporary data folder."""
    folder = Path(tempfile.mkdtemp(prefix="orchestrator-tests-"))
    folder.chmod(0o755)
    with EmbeddedServices(folder / "services") as running:
        database.upgrade(running.database_url)
        with administering(running) as cursor:
            cursor.execute("ALTER DATABASE orchestrator ALLOW_CONNECTIONS false")  # the template of all test databases
            cursor.execute("ALTER SYSTEM SET fsync = off")  # tests kill Postgres processes, but never the machine
            cursor.execute("ALTER SYSTEM SET full_page_writes = off")
            cursor.execute("SELECT pg_reload_conf()")
        yield running
        running.postgres.stop(
            "immediate"
        )  # skip the shutdown checkpoint: hundreds of databases need not reach the disk
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def database_url(services: EmbeddedServices) -> Iterator[str]:
    """URL of an empty database with the current schema."""
    with new_database(services, "test", "orchestrator") as url:
        yield url
        KEPT.close()


@pytest.fixture(scope="module")
def redis_url(services: EmbeddedServices) -> str:
    """URL of an empty Redis."""
    redis = Redis.from_url(services.redis_url)
    redis.flushall()
    redis.close()
    return services.redis_url
