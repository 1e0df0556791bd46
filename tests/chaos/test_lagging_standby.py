"""A standby takes over that has not received the last commits, under tasks that enqueue others."""

from __future__ import annotations

import json
from pathlib import Path

from orchestrator.embedded import EmbeddedPostgres
from orchestrator.transport.keys import Keys
from tests.acceptance.conftest import fresh_stack, project
from tests.acceptance.stack import Stack
from tests.chaos.breakable import SETTINGS, command, folder, postgres, trouble
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
