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
from tests.connections import KEPT, find_the_version_of_redis_once
from tests.databases import administering, new_database

# Whoever started us may ignore these, as nohup does; what we start would inherit that, and obey nobody.
for _number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)

# By default httpx waits 5 s for an answer, which would say something of the machine, not of who is asked.
for _part in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _part, 60.0)

# A client of httpx reads all certificates when it is made, 30 ms, and many tests make one for each request.
httpx._transports.default.create_ssl_context = functools.cache(httpx._transports.default.create_ssl_context)  # type: ignore[attr-defined]

# The same examples in every run: a failure belongs to the commit that shows it.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("quick", settings.get_profile("repeatable"), max_examples=15)  # scripts/test --quick
settings.load_profile("repeatable")

find_the_version_of_redis_once()

# What processes load that the tests start: see there.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent / "startup"), os.environ.get("PYTHONPATH")])
)

gc.disable()  # all that is loaded and collected stays; see pytest_collection_finish


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark a test `long` whose parameters have one of the ids of its `long_for`."""
    for item in items:
        ids = item.callspec.id.split("-") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else []
        if any(set(ids) & set(marker.args) for marker in item.iter_markers("long_for")):
            item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """Look for garbage from now on, and not among what stays."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    yield
    exits.check()


@pytest.fixture(scope="session")
def services() -> Iterator[EmbeddedServices]:
    """Postgres and Redis in a folder of their own."""
    folder = Path(tempfile.mkdtemp(prefix="orchestrator-tests-"))
    folder.chmod(0o755)
    with EmbeddedServices(folder / "services") as running:
        database.upgrade(running.database_url)
        with administering(running) as cursor:
            cursor.execute("ALTER DATABASE orchestrator ALLOW_CONNECTIONS false")  # all others are copies of it
            cursor.execute("ALTER SYSTEM SET fsync = off")  # its processes are killed here, and never the machine
            cursor.execute("ALTER SYSTEM SET full_page_writes = off")
            cursor.execute("SELECT pg_reload_conf()")
        yield running
        running.postgres.stop("immediate")  # its hundreds of databases need not reach the disk
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def database_url(services: EmbeddedServices) -> Iterator[str]:
    """An empty database with the current schema."""
    with new_database(services, "test", "orchestrator") as url:
        yield url
        KEPT.close()


@pytest.fixture(scope="module")
def redis_url(services: EmbeddedServices) -> str:
    """An empty Redis."""
    redis = Redis.from_url(services.redis_url)
    redis.flushall()
    redis.close()
    return services.redis_url
