"""Two deployments of the program in docs/scaling.md: losing the Postgres of one stops only its own work."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import NamedTuple

import pytest

from orchestrator import Handle, NotFound, Unavailable, Uncertain
from orchestrator.embedded import EmbeddedPostgres, EmbeddedRedis
from tests.acceptance.pages import REPOSITORY, files_in
from tests.acceptance.stack import Stack
from tests.chaos import breakable
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)


class World(NamedTuple):
    """Both deployments, and the program."""

    europe: Stack
    america: Stack
    postgres: EmbeddedPostgres
    """The Postgres of Europe."""
    program: ModuleType


@pytest.fixture
def world(database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with ExitStack() as closing:
        folder = closing.enter_context(breakable.folder())
        (folder / "cells.py").write_text(files_in(REPOSITORY / "docs" / "scaling.md")["cells.py"])
        server, own_url = closing.enter_context(breakable.postgres(folder / "europe"))
        redis = EmbeddedRedis(folder / "redis")
        redis.start()
        closing.callback(redis.stop)
        urls = {"EU": (own_url, redis.url), "US": (database_url, redis_url)}
        for name, (database, queue) in urls.items():
            monkeypatch.setenv(f"{name}_DATABASE", database)
            monkeypatch.setenv(f"{name}_REDIS", queue)
        stacks = []
        for name, (database, queue) in urls.items():
            (folder / name).mkdir()
            stack = Stack(database, queue, folder / name, **breakable.SETTINGS)
            closing.callback(stack.close)
            stack.redis.flushall()
            stack.scheduler()
            stack.worker("--app", "cells:app", folder=folder)
            stacks.append(stack)
        monkeypatch.syspath_prepend(str(folder))
        sys.modules.pop("cells", None)  # imported by another test, with other servers
        program = importlib.import_module("cells")
        for cell in program.cells.values():
            closing.callback(cell.close)
        yield World(stacks[0], stacks[1], server, program)


def of(stack: Stack, *handles: Handle[str]) -> int:
    """Return how many of the tasks a deployment knows."""
    ids = [handle.id for handle in handles]
    found = (
        "SELECT count(*) FROM (SELECT id FROM orchestrator.tasks UNION SELECT id FROM orchestrator.ended_tasks) AS f"
    )
    return int(stack.scalar(f"{found} WHERE id = ANY(CAST(:ids AS uuid[]))", ids=ids))


def test_each_call_and_its_handle_use_the_same_cell(world: World) -> None:
    cells, bill = world.program.cells, world.program.bill
    here = [bill.via(cells["EU"]).enqueue(f"e{number}") for number in range(5)]
    there = cells["US"].enqueue_many(bill, [(f"a{number}",) for number in range(5)])
    assert [handle.result(timeout=60) for handle in here] == [f"billed e{number}" for number in range(5)]
    assert [handle.result(timeout=60) for handle in there] == [f"billed a{number}" for number in range(5)]
    assert (of(world.europe, *here), of(world.europe, *there)) == (5, 0)
    assert (of(world.america, *here), of(world.america, *there)) == (0, 5)
    assert cells["EU"].handle(here[0].id).result(timeout=60) == "billed e0"
    with pytest.raises(NotFound):
        cells["US"].handle(here[0].id).status()
    composed = bill.via(cells["US"]).s("c").start()
    assert composed.result(timeout=60) == "billed c"
    passed_on = world.program.bill_in.via(cells["US"]).enqueue("EU", "from afar").result(timeout=60)
    assert cells["EU"].handle(passed_on).result(timeout=60) == "billed from afar"


def test_losing_one_cell_stops_only_its_own_work(world: World) -> None:
    cells, bill = world.program.cells, world.program.bill
    assert bill.via(cells["EU"]).enqueue("before").result(timeout=60) == "billed before"
    delayed = [bill.options(delay=2).via(cells["EU"]).enqueue(f"d{number}") for number in range(10)]
    os.kill(world.postgres.pid, signal.SIGKILL)
    world.postgres.kill()
    with pytest.raises((Unavailable, Uncertain)):  # `Uncertain` over an open connection
        bill.via(cells["EU"]).enqueue("refused")
    there = [bill.via(cells["US"]).enqueue(f"a{number}") for number in range(50)]
    assert [handle.result(timeout=30) for handle in there] == [f"billed a{number}" for number in range(50)]
    assert all(not process.logged("service.unavailable") for process in world.america.processes)
    eventually(lambda: world.europe.processes[0].logged("service.unavailable: Postgres"), "Europe stands still")
    world.postgres.start()
    assert [handle.result(timeout=60) for handle in delayed] == [f"billed d{number}" for number in range(10)]
    assert of(world.america, *delayed) == 0
