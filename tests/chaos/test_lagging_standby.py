"""A standby takes over: one that has not received the last commits, and one that has, under load."""

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
"""No worker dies here, and none counts as dead because the machine is busy."""


def lead_to(server: EmbeddedPostgres, link: Path) -> None:
    """Have everybody connect to this server from now on."""
    draft = link.with_name("draft")
    draft.symlink_to(str(server._socket_folder))
    draft.replace(link)


def set_aside(stack: Stack) -> dict[str, str]:
    """Return what `orchestrator quarantine` shows of each message, by its error."""
    listed = json.loads(command(stack, "quarantine", "list", "--json").stdout)["messages"]
    return {found["error"]: command(stack, "quarantine", "show", found["id"]).stdout for found in listed}


def test_what_tasks_have_enqueued_is_there_after_a_failover_that_lost_it(redis_url: str) -> None:
    with folder() as place, postgres(place / "postgres") as (primary, _):
        link = place / "current"
        lead_to(primary, link)
        url = f"postgresql://postgres@/orchestrator?host={link}"
        standby = Standby(place / "standby", primary)
        try:
            with fresh_stack(url, redis_url, place, **PATIENT) as stack:
                scheduler = stack.scheduler()
                stack.worker("--concurrency", str(PARENTS + 2))
                standby.follow(synchronous=False)
                names = ("started", "enqueued", "end")
                files = [[str(place / f"{name}-{number}") for name in names] for number in range(PARENTS)]
                go, log = str(place / "go"), str(place / "log")
                parents = [
                    project.parent_until.enqueue(started, go, enqueued, end, log, CHILDREN)
                    for started, enqueued, end in files
                ]
                eventually(lambda: all(parent.status() == "running" for parent in parents), "the parents run")
                there = "SELECT count(*) FROM orchestrator.tasks WHERE status = 'running'"
                replica = standby.database_url("orchestrator")
                eventually(lambda: ask(replica, there) == [(PARENTS,)], "the standby knows that")
                standby.fall_behind()

                Path(go).touch()
                eventually(lambda: all(Path(enqueued).exists() for _, enqueued, _ in files), "they enqueue children")
                Path(files[0][2]).touch()
                assert len(parents[0].result(timeout=60)) == CHILDREN
                lost = project.add.enqueue(1, 1)
                assert lost.result(timeout=60) == 2

                primary.stop("immediate")
                standby.promote()
                lead_to(standby, link)
                eventually(lambda: scheduler.logged("postgres.commits_lost"), "it is noticed", 60)
                for _, _, end in files:
                    Path(end).touch()
                for parent in parents:
                    children = project.app.handle(parent.id).result(timeout=60)  # the first one has its result
                    assert len(children) == CHILDREN
                    for child in children:
                        project.app.handle(child).result(timeout=60)
                how = "SELECT status, attempt, losses FROM orchestrator.ended_tasks WHERE name = 'project.parent_until'"
                assert stack.sql(how) == [("success", 1, 0)] * PARENTS, "each ran once"

                eventually(lambda: stack.redis.xlen(Keys().quarantine), "what is gone is told")
                ((error, shown),) = set_aside(stack).items()
                assert error == "Postgres has lost tasks: 1 of project.add (succeeded)"
                assert lost.id in shown
                assert "set aside" in trouble(stack)
        finally:
            standby.stop("immediate")


def test_a_synchronous_standby_takes_over_by_a_url_with_both_hosts(redis_url: str) -> None:
    with folder() as place, postgres(place / "postgres") as (primary, _):
        standby = Standby(place / "standby", primary)
        standby.follow()
        sockets = ",".join(f"{quote(str(server._socket_folder), safe='')}:5432" for server in (primary, standby))
        url = f"postgresql://postgres@{sockets}/orchestrator?target_session_attrs=read-write"
        log, numbers, stop = place / "log", count(), threading.Event()

        def load() -> None:
            """Enqueue each number until that was accepted."""
            while not stop.is_set():
                accepted = partial(accepts, log, next(numbers))
                eventually(accepted, "a task is accepted", 60, every=0.1)

        def goes_on() -> None:
            before = len(lines(log))
            eventually(lambda: len(lines(log)) > before + 100, "tasks run", 60)

        loading = threading.Thread(target=load, name="load")
        try:
            with fresh_stack(url, redis_url, place, **PATIENT) as stack:
                for _ in range(2):
                    scheduler = stack.scheduler()
                stack.worker()
                loading.start()
                goes_on()
                primary.stop("immediate")
                standby.promote()
                goes_on()
                stop.set()
                loading.join()
                each_ran_once(stack, log, next(numbers))
                assert not scheduler.logged("postgres.commits_lost")
                assert stack.scalar("SELECT pg_is_in_recovery()") is False
                assert all(process.is_running() for process in stack.processes)
        finally:
            stop.set()
            standby.stop("immediate")


def accepts(log: Path, number: int) -> bool:
    """Enqueue a number, once however often it is tried; say whether that was accepted."""
    try:
        project.logged.options(idempotency_key=str(number)).enqueue(str(log), number)
    except (Unavailable, Uncertain):
        return False
    return True
