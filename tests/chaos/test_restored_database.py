"""Postgres is put back to where it was a while ago, under processes that go on and a Redis that remembers more."""

from __future__ import annotations

import shutil
from pathlib import Path

from orchestrator.embedded import EmbeddedPostgres
from orchestrator.transport.keys import Keys
from tests.acceptance.conftest import fresh_stack, project
from tests.acceptance.stack import Stack
from tests.chaos.breakable import SETTINGS, folder, lines, postgres
from tests.waiting import eventually


def keep(server: EmbeddedPostgres, copy: Path) -> None:
    """Copy the files of a server, which is stopped for it."""
    server.stop()
    shutil.copytree(server.data, copy)
    server.start()


def put_back(server: EmbeddedPostgres, copy: Path) -> None:
    """Let a server die, and come back with the files that were kept."""
    server.stop("immediate")
    owner = server.data.stat()
    shutil.rmtree(server.data)
    shutil.copytree(copy, server.data)
    for path in [server.data, *server.data.rglob("*")]:
        shutil.chown(path, owner.st_uid, owner.st_gid)
    server.start()


def generation(stack: Stack) -> str:
    return str(stack.scalar("SELECT generation FROM orchestrator.cursors"))


def test_what_tasks_enqueue_while_commits_are_lost_is_not_lost(redis_url: str) -> None:
    """A change of leader is lost with them, so that its term is issued again."""
    with (
        folder() as place,
        postgres(place / "postgres") as (server, url),
        fresh_stack(url, redis_url, place, **SETTINGS) as stack,
    ):
        first = stack.scheduler()
        stack.worker()
        started, go, log = (str(place / name) for name in ("started", "go", "log"))
        handle = project.parent_when.enqueue(started, go, log, 5)
        eventually(lambda: Path(started).exists(), "the parent runs")
        eventually(lambda: handle.status() == "running", "and is known to")
        keep(server, place / "copy")
        first.kill()
        stack.redis.flushall()
        second = stack.scheduler()
        assert project.add.enqueue(1, 1).result(timeout=60) == 2
        forgotten = generation(stack)
        second.kill()
        Path(go).touch()
        events = Keys().events(forgotten)
        eventually(lambda: stack.redis.xlen(events) >= 1, "what it enqueues stands in the stream")
        put_back(server, place / "copy")
        third = stack.scheduler()
        assert len(handle.result(timeout=60)) == 5
        eventually(lambda: sorted(lines(Path(log))) == list("01234"), "all that it enqueued runs")
        assert generation(stack) != forgotten
        assert third.logged("postgres.commits_lost")
        assert stack.redis.get(Keys().database), "an ordinary server tells which life it is in"
        shown = "SELECT status, failures, losses FROM orchestrator.ended_tasks WHERE name = 'project.parent_when'"
        assert stack.sql(shown) == [("success", 0, 0)], "it ran once"
