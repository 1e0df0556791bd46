"""Postgres is restored to an earlier state while processes run and Redis has newer data."""

from __future__ import annotations

import shutil
from pathlib import Path

from orchestrator.embedded import EmbeddedPostgres
from orchestrator.transport.keys import Keys
from tests.acceptance.conftest import fresh_stack, project
from tests.acceptance.stack import Stack
from tests.chaos.breakable import SETTINGS, folder, lines, postgres
from tests.waiting import eventually


def back_up(server: EmbeddedPostgres, copy: Path) -> None:
    """Stop a server, copy its files, and start it again."""
    server.stop()
    shutil.copytree(server.data, copy)
    server.start()


def restore(server: EmbeddedPostgres, copy: Path) -> None:
    """Kill a server, and restart it with the files of the copy."""
    server.stop("immediate")
    owner = server.data.stat()
    shutil.rmtree(server.data)
    shutil.copytree(copy, server.data)
    for path in [server.data, *server.data.rglob("*")]:
        shutil.chown(path, owner.st_uid, owner.st_gid)
    server.start()


def generation(stack: Stack) -> str:
    return str(stack.scalar("SELECT generation FROM orchestrator.cursors"))


def test_tasks_enqueued_around_a_restore_are_not_lost(redis_url: str) -> None:
    """The restore also loses a change of leader, so that its term is issued again."""
    with (
        folder() as directory,
        postgres(directory / "postgres") as (server, url),
        fresh_stack(url, redis_url, directory, **SETTINGS) as stack,
    ):
        first = stack.scheduler()
        stack.worker()
        started, go, log = (str(directory / name) for name in ("started", "go", "log"))
        handle = project.parent_when.enqueue(started, go, log, 5)
        eventually(lambda: Path(started).exists(), "the parent runs")
        eventually(lambda: handle.status() == "running", "and is known to")
        back_up(server, directory / "copy")
        first.kill()
        stack.redis.flushall()
        second = stack.scheduler()
        assert project.add.enqueue(1, 1).result(timeout=60) == 2
        forgotten = generation(stack)
        second.kill()
        Path(go).touch()
        events = Keys().events(forgotten)
        eventually(lambda: stack.redis.xlen(events) >= 1, "what it enqueues stands in the stream")
        restore(server, directory / "copy")
        third = stack.scheduler()
        assert len(handle.result(timeout=60)) == 5
        eventually(lambda: sorted(lines(Path(log))) == list("01234"), "all that it enqueued runs")
        assert generation(stack) != forgotten
        assert third.logged("postgres.commits_lost")
        assert stack.redis.get(Keys().database), "an ordinary server tells which life it is in"
        outcome = "SELECT status, failures, losses FROM orchestrator.ended_tasks WHERE name = 'project.parent_when'"
        assert stack.sql(outcome) == [("success", 0, 0)], "it ran once"
