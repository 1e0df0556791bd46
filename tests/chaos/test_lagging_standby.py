"""Failover to a Postgres standby under load: to one that lacks the last commits, and to one that has them."""

from __future__ import annotations

import json
import threading
from functools import partial
from itertools import count
from pathlib import Path
from urllib.parse import quote

from orchestrator import Unavailable, Uncertain
from orchestrator.embedded import EmbeddedPostgres
from orchestrator.transport.keys import Keys
from tests.acceptance.conftest import fresh_stack, project
from tests.acceptance.stack import Stack
from tests.chaos.breakable import SETTINGS, command, each_ran_once, folder, lines, postgres, trouble
from tests.chaos.real.standby import Standby, ask
from tests.waiting import eventually

PARENTS, CHILDREN = 6, 4
PATIENT = {**SETTINGS, "worker_ttl": 30.0}
"""A long TTL: no worker dies here, and none may count as dead on a busy machine."""


def redirect_to(server: EmbeddedPostgres, link: Path) -> None:
    """Direct all new connections to this server."""
    draft = link.with_name("draft")
    draft.symlink_to(str(server._socket_folder))
    draft.replace(link)


def quarantined_messages(stack: Stack) -> dict[str, str]:
    """Return the output of `orchestrator quarantine show` for each quarantined message, by its error."""
    listed = json.loads(command(stack, "quarantine", "list", "--json").stdout)["messages"]
    return {found["error"]: command(stack, "quarantine", "show", found["id"]).stdout for found in listed}


def test_children_of_tasks_survive_a_failover_that_lost_their_rows(redis_url: str) -> None:
    with folder() as directory, postgres(directory / "postgres") as (primary, _):
        link = directory / "current"
        redirect_to(primary, link)
        url = f"postgresql://postgres@/orchestrator?host={link}"
        standby = Standby(directory / "standby", primary)
        try:
            with fresh_stack(url, redis_url, directory, **PATIENT) as stack:
                scheduler = stack.scheduler()
                stack.worker("--concurrency", str(PARENTS + 2))
                standby.follow(synchronous=False)
                names = ("started", "enqueued", "end")
                files = [[str(directory / f"{name}-{number}") for name in names] for number in range(PARENTS)]
                go, log = str(directory / "go"), str(directory / "log")
                parents = [
                    project.parent_until.enqueue(started, go, enqueued, end, log, CHILDREN)
                    for started, enqueued, end in files
                ]
                eventually(lambda: all(parent.status() == "running" for parent in parents), "the parents run")
                count_running = "SELECT count(*) FROM orchestrator.tasks WHERE status = 'running'"
                replica = standby.database_url("orchestrator")
                eventually(lambda: ask(replica, count_running) == [(PARENTS,)], "the standby knows that")
                standby.fall_behind()

                Path(go).touch()
                eventually(lambda: all(Path(enqueued).exists() for _, enqueued, _ in files), "they enqueue children")
                Path(files[0][2]).touch()
                assert len(parents[0].result(timeout=60)) == CHILDREN
                lost = project.add.enqueue(1, 1)
                assert lost.result(timeout=60) == 2

                primary.stop("immediate")
                standby.promote()
                redirect_to(standby, link)
                eventually(lambda: scheduler.logged("postgres.commits_lost"), "it is noticed", 60)
                for _, _, end in files:
                    Path(end).touch()
                for parent in parents:
                    children = project.app.handle(parent.id).result(
                        timeout=60
                    )  # the first parent's result was lost and restored
                    assert len(children) == CHILDREN
                    for child in children:
                        project.app.handle(child).result(timeout=60)
                how = "SELECT status, attempt, losses FROM orchestrator.ended_tasks WHERE name = 'project.parent_until'"
                assert stack.sql(how) == [("success", 1, 0)] * PARENTS, "each ran once"

                eventually(lambda: stack.redis.xlen(Keys().quarantine), "what is gone is told")
                ((error, output),) = quarantined_messages(stack).items()
                assert error == "Postgres has lost tasks: 1 of project.add (succeeded)"
                assert lost.id in output
                assert "set aside" in trouble(stack)
        finally:
            standby.stop("immediate")


def test_clients_find_a_promoted_standby_by_a_url_with_both_hosts(redis_url: str) -> None:
    with folder() as directory, postgres(directory / "postgres") as (primary, _):
        standby = Standby(directory / "standby", primary)
        standby.follow()
        sockets = ",".join(f"{quote(str(server._socket_folder), safe='')}:5432" for server in (primary, standby))
        url = f"postgresql://postgres@{sockets}/orchestrator?target_session_attrs=read-write"
        log, numbers, stop = directory / "log", count(), threading.Event()

        def load() -> None:
            """Enqueue one number after another; retry each until it is accepted."""
            while not stop.is_set():
                accepted = partial(try_to_enqueue, log, next(numbers))
                eventually(accepted, "a task is accepted", 60, every=0.1)

        def check_progress() -> None:
            before = len(lines(log))
            eventually(lambda: len(lines(log)) > before + 100, "tasks run", 60)

        loading = threading.Thread(target=load, name="load")
        try:
            with fresh_stack(url, redis_url, directory, **PATIENT) as stack:
                for _ in range(2):
                    scheduler = stack.scheduler()
                stack.worker()
                loading.start()
                check_progress()
                primary.stop("immediate")
                standby.promote()
                check_progress()
                stop.set()
                loading.join()
                each_ran_once(stack, log, next(numbers))
                assert not scheduler.logged("postgres.commits_lost")
                assert stack.scalar("SELECT pg_is_in_recovery()") is False
                assert all(process.is_running() for process in stack.processes)
        finally:
            stop.set()
            standby.stop("immediate")


def try_to_enqueue(log: Path, number: int) -> bool:
    """Try to enqueue a number, idempotently; return whether it was accepted."""
    try:
        project.logged.options(idempotency_key=str(number)).enqueue(str(log), number)
    except (Unavailable, Uncertain):
        return False
    return True
