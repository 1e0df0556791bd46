"""A leader that holds its lease but cannot work, while another scheduler could."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.acceptance.conftest import fresh_stack, project
from tests.acceptance.stack import Process, Stack
from tests.chaos.breakable import trouble
from tests.chaos.real.proxy import Proxies, Proxy
from tests.waiting import eventually

LEASE = 0.6


@pytest.fixture
def lease() -> float:
    return LEASE


@pytest.fixture
def stack(database_url: str, redis_url: str, tmp_path: Path, lease: float) -> Iterator[Stack]:
    """A stack without processes."""
    with fresh_stack(database_url, redis_url, tmp_path, lease=lease, worker_ttl=3.0, heartbeat=0.25) as stack:
        yield stack


@pytest.fixture
def wire(redis_url: str) -> Iterator[Proxy]:
    """A proxy to Redis that can be cut."""
    with Proxies() as proxies:
        yield proxies.to(Path(urlsplit(redis_url).path))


def scheduler_with(stack: Stack, **environment: str) -> Process:
    """Start a scheduler with additional variables, and wait until it leads."""
    before = dict(stack.environment)
    stack.environment |= environment
    try:
        process = stack.scheduler()
    finally:
        stack.environment = before
    eventually(lambda: stack.leader() is process, "it leads")
    return process


def redis_url_through(wire: Proxy) -> dict[str, str]:
    return {"ORCHESTRATOR_REDIS_URL": f"redis://127.0.0.1:{wire.port}/0"}


def test_a_leader_cut_off_from_redis_is_replaced_by_a_connected_standby(stack: Stack, wire: Proxy) -> None:
    cut_off = scheduler_with(stack, **redis_url_through(wire))
    healthy = stack.scheduler()
    stack.worker()
    assert project.add.enqueue(1, 1).result(timeout=60) == 2
    wire.cut()
    assert project.add.enqueue(1, 2).result(timeout=60) == 3, "before the wire is mended"
    eventually(lambda: stack.leader() is healthy, "the one that Redis takes leads")
    wire.heal()
    assert project.add.enqueue(2, 2).result(timeout=60) == 4
    assert cut_off.stop() == 0


@pytest.mark.parametrize("lease", [2.5])  # longer than the pause after a defect, so that the leader renews its lease
def test_a_leader_that_cannot_tick_is_replaced(stack: Stack, database_url: str) -> None:
    """The first leader's role may write the lease only, so that every tick fails."""
    with stack.engine.connect() as connection:
        if not connection.exec_driver_sql("SELECT 1 FROM pg_roles WHERE rolname = 'clumsy'").all():
            connection.exec_driver_sql("CREATE ROLE clumsy LOGIN")
        connection.exec_driver_sql("GRANT USAGE ON SCHEMA orchestrator TO clumsy")
        connection.exec_driver_sql("GRANT SELECT ON ALL TABLES IN SCHEMA orchestrator TO clumsy")
        connection.exec_driver_sql("GRANT INSERT, UPDATE ON orchestrator.leases TO clumsy")
    url = database_url.replace("postgres@", "clumsy@", 1)
    assert url != database_url
    clumsy = scheduler_with(stack, ORCHESTRATOR_DATABASE_URL=url)
    healthy = stack.scheduler()
    stack.worker(wait=False)
    assert project.add.enqueue(1, 2).result(timeout=60) == 3
    eventually(lambda: stack.leader() is healthy, "the one that can leads")
    assert clumsy.stop() == 0


@pytest.mark.parametrize("lease", [2.5])  # long enough to keep the lease on a machine that freezes for a moment
def test_a_leader_in_trouble_stays_if_no_standby_could_work(stack: Stack, wire: Proxy) -> None:
    first = scheduler_with(stack, **redis_url_through(wire))
    before = dict(stack.environment)
    stack.environment |= redis_url_through(wire)
    second = stack.scheduler()
    stack.environment = before
    stack.worker()
    assert project.add.enqueue(1, 1).result(timeout=60) == 2
    wire.cut()
    handle = project.add.enqueue(1, 2)

    def complains() -> str | None:
        return trouble(stack).get("leader in trouble")

    complaint = eventually(complains, "status says that the leader cannot work")
    assert str(first.pid) in complaint
    assert "it cannot use Redis" in complaint
    assert ".." not in complaint
    assert "no worker" not in trouble(stack), "nobody can say so"
    eventually(lambda: second.logged("scheduler.not_leading"), "the standby says that it could not do better")
    assert stack.leader() is first
    wire.heal()
    assert handle.result(timeout=60) == 3
    eventually(lambda: not trouble(stack), "nothing is wrong any more")


@pytest.mark.parametrize("role", ["leader", "standby"])
@pytest.mark.parametrize("fault", ["cut", "stall"])
def test_a_scheduler_without_redis_stops_at_sigterm(stack: Stack, wire: Proxy, role: str, fault: str) -> None:
    if role == "standby":
        stack.scheduler()
        stack.leader()
        stack.environment |= redis_url_through(wire)
        process = stack.scheduler()
    else:
        process = scheduler_with(stack, **redis_url_through(wire))
    getattr(wire, fault)()
    eventually(lambda: process.logged("cannot be used") or role == "standby" or fault == "stall", "it notices")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
