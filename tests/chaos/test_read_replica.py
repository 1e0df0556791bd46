"""Lists and charts from a streaming standby: their age, read-your-writes, and an outage of the standby."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import NamedTuple
from uuid import UUID

import pytest

from orchestrator.api.app import create_app
from orchestrator.sdk.backend import Backend
from orchestrator.sdk.tasks.by_name import call_by_name
from orchestrator.settings import Settings, load_settings
from tests.chaos.breakable import folder, postgres
from tests.chaos.real.standby import Standby, ask
from tests.integration.visitor import Visitor
from tests.waiting import eventually

LIST, OLD = "/api/v1/tasks", "Lists and charts are"


class Servers(NamedTuple):
    settings: Settings
    standby: Standby

    def visitor(self) -> Visitor:
        """Return a visitor of a new API server."""
        return Visitor(create_app(self.settings))

    def pause_replay(self) -> None:
        """Pause the standby's replay once it has all data."""
        ask(self.standby.url, "SELECT pg_wal_replay_pause()")
        paused = "SELECT pg_get_wal_replay_pause_state()"
        eventually(lambda: ask(self.standby.url, paused) == [("paused",)], "it stands still")

    def resume_replay(self) -> None:
        ask(self.standby.url, "SELECT pg_wal_replay_resume()")


@pytest.fixture
def servers(redis_url: str) -> Iterator[Servers]:
    with folder() as directory, postgres(directory / "postgres") as (primary, url):
        standby = Standby(directory / "standby", primary)
        standby.follow(synchronous=False)
        reads = standby.database_url("orchestrator")
        settings = load_settings(environ={}, database_url=url, redis_url=redis_url, read_database_url=reads)
        try:
            yield Servers(settings, standby)
        finally:
            standby.stop("immediate")


def enqueue(servers: Servers, name: str) -> UUID:
    with closing(Backend(servers.settings)) as backend:
        return UUID(
            bytes=backend.tasks.enqueue(call_by_name(servers.settings, name, [], {}, options={}, queue="default"))
        )


def shows(visitor: Visitor, *names: str) -> bool:
    """Return whether the dashboard page and the API's list contain exactly these tasks."""
    names_on_page = set(re.findall(r">(t\.\w+)</a>", visitor.get("/ui/tasks").text))
    listed = {task["name"] for task in visitor.get(LIST).json()["items"]}
    return names_on_page == listed == set(names)


def test_lists_from_the_standby_report_their_age(servers: Servers) -> None:
    visitor = servers.visitor()
    enqueue(servers, "t.first")
    eventually(lambda: shows(visitor, "t.first"), "the standby has it")
    eventually(lambda: "Age" not in visitor.get(LIST).headers, "it does not lag")
    assert OLD not in visitor.get("/ui").text

    servers.pause_replay()
    second = enqueue(servers, "t.second")
    eventually(lambda: int(visitor.get(LIST).headers.get("Age", 0)) >= 2, "its age is told")
    assert shows(visitor, "t.first")
    assert re.search(rf"{OLD} \S+ old: the read replica is behind", visitor.get("/ui/tasks").text)
    assert visitor.get(f"{LIST}/{second}").status_code == 200, "one task is read from the primary"

    servers.resume_replay()
    eventually(lambda: shows(visitor, "t.first", "t.second"), "it has caught up")
    eventually(lambda: OLD not in visitor.get("/ui/tasks").text, "it does not lag any more")


def test_a_user_sees_their_own_writes_on_every_api_server(servers: Servers) -> None:
    visitor, other, stranger = servers.visitor(), servers.visitor(), servers.visitor()
    enqueue(servers, "t.first")
    everybody = (visitor, other, stranger)
    eventually(lambda: all(shows(anyone, "t.first") for anyone in everybody), "the standby has it")
    servers.pause_replay()
    enqueue(servers, "t.second")
    assert shows(visitor, "t.first")
    assert shows(other, "t.first")

    visitor.get("/ui/queues")
    assert visitor.post("/ui/queues/default/pause", back="/ui/queues").status_code == 303
    assert shows(visitor, "t.first", "t.second"), "from the primary"
    other.cookies = visitor.cookies
    assert shows(other, "t.first", "t.second"), "which the other server knows from a cookie"
    assert shows(stranger, "t.first")

    servers.resume_replay()
    eventually(lambda: shows(stranger, "t.first", "t.second"), "it has caught up")
    visitor.get(LIST)
    servers.pause_replay()
    enqueue(servers, "t.third")
    eventually(lambda: shows(visitor, "t.first", "t.second"), "lists come from the standby again")


def test_a_list_after_an_api_write_comes_from_the_primary(servers: Servers) -> None:
    visitor = servers.visitor()
    assert shows(visitor)
    servers.pause_replay()
    enqueue(servers, "t.first")
    assert shows(visitor)
    assert visitor._send("POST", "/api/v1/queues/default/pause", {}, json={}).status_code == 200
    assert shows(visitor, "t.first")


def test_the_primary_answers_while_the_standby_is_down(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    visitor = servers.visitor()
    enqueue(servers, "t.first")
    eventually(lambda: shows(visitor, "t.first"), "the standby has it")
    servers.standby.stop("immediate")
    enqueue(servers, "t.second")
    for _ in range(3):
        assert shows(visitor, "t.first", "t.second")
    warned = [line.message for line in caplog.records if line.levelname == "WARNING"]
    assert len(warned) == 1
    assert warned[0].startswith("service.unavailable: The read replica cannot be used; the primary answers: ")


def test_the_primary_answers_while_the_standby_hangs(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    pids = [int(str(pid)) for (pid,) in ask(servers.standby.url, "SELECT pid FROM pg_stat_activity")]
    group = [servers.standby.pid, *pids]
    for pid in group:
        with suppress(ProcessLookupError):  # the backend of this query has ended
            os.kill(pid, signal.SIGSTOP)
    try:
        enqueue(servers, "t.first")
        visitor, began = servers.visitor(), time.monotonic()
        assert shows(visitor, "t.first"), "the primary answers"
        assert time.monotonic() - began < 8, "a connection has ten seconds"
        assert caplog.text.count("The read replica cannot be used") == 1
    finally:
        for pid in group:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def test_a_primary_configured_as_read_replica_is_logged(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(replace(servers.settings, read_database_url=servers.settings.database_url))
    assert shows(Visitor(app))
    assert "it is a primary. Name a standby in the setting read_database_url." in caplog.text
