"""All but the scheduler connect through PgBouncer in transaction mode: each statement may use another session."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import psycopg2
import pytest

from orchestrator.embedded import EmbeddedServices
from tests.acceptance.conftest import fresh_stack, project
from tests.acceptance.stack import Stack, using
from tests.waiting import eventually

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        shutil.which("pgbouncer") is None, reason="no pgbouncer on PATH (Debian: apt install pgbouncer)"
    ),
]
SESSIONS = 2
CALLERS = 12


@pytest.fixture
def pooled_url(services: EmbeddedServices, database_url: str) -> Iterator[str]:
    """The database of this module, through a pooler with few sessions for all clients."""
    folder = Path(tempfile.mkdtemp(prefix="pgbouncer-"))
    owner = pwd.getpwuid(services.postgres.data.stat().st_uid)
    os.chown(folder, owner.pw_uid, owner.pw_gid)
    folder.chmod(0o755)
    settings = f"""
        [databases]
        * = host={services.postgres.url.partition("?host=")[2]} user=postgres
        [pgbouncer]
        listen_port = 5432
        unix_socket_dir = {folder}
        logfile = {folder}/log
        auth_type = any
        pool_mode = transaction
        default_pool_size = {SESSIONS}
        max_client_conn = 500
    """
    configuration = folder / "pgbouncer.ini"
    configuration.write_text("\n".join(line.strip() for line in settings.splitlines()))
    command = ["pgbouncer", "-q", str(configuration)]
    as_owner = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []} if os.geteuid() == 0 else {}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **as_owner)  # type: ignore[call-overload]
    try:
        eventually((folder / ".s.PGSQL.5432").exists, f"the pooler is there, see {folder}/log")
        yield database_url.partition("?")[0] + f"?host={folder}"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


@pytest.fixture
def pooled(pooled_url: str, database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Stack]:
    """Programs, commands, the API and a worker behind the pooler; the scheduler connects directly."""
    (tmp_path / "pooled").mkdir()
    with fresh_stack(database_url, redis_url, tmp_path) as direct:
        direct.scheduler()
        stack = Stack(pooled_url, redis_url, tmp_path / "pooled")
        with using(project.app, stack):
            stack.worker("--database")
            yield stack
            stack.close()


def test_programs_workers_commands_and_the_api_share_few_sessions(pooled: Stack) -> None:
    address = pooled.api()
    key = json.loads(pooled.output_of("keys", "create", "test", "--scope", "read", "--json"))["key"]

    def call(number: int) -> list[object]:
        """Make a program's calls; return the results."""
        handle = project.add.options(idempotency_key=f"k{number}").enqueue(number, 1)
        asked = project.approval.start(60.0)
        later = project.add.options(delay=3600).enqueue(number, 2)
        found, child = project.in_one_transaction.enqueue(number, 1).result(60).split()
        with closing(psycopg2.connect(pooled.settings.database_url)) as connection:
            within = project.add.enqueue_in(connection, number, 3)
            connection.commit()
        later.cancel()
        asked.resolve("approval", f"yes {number}")
        many = project.app.enqueue_many(project.add, [(number, other) for other in range(5)])
        return [
            handle.result(60),
            asked.result(60),
            found,
            project.app.handle(child).result(60),
            within.result(60),
            [one.result(60) for one in many],
            eventually(lambda: later.status() == "cancelled", "it is cancelled"),
        ]

    with ThreadPoolExecutor(CALLERS) as callers:
        answers = list(callers.map(call, range(CALLERS * 3)))
    expected = [
        [n + 1, f"yes {n}", "orchestrator.tasks", n + 1, n + 3, [n + other for other in range(5)], True]
        for n in range(CALLERS * 3)
    ]
    assert answers == expected

    assert "leads in term" in pooled.output_of("status")
    assert "project.add" in pooled.output_of("tasks", "list", "--status", "success")
    assert pooled.command("db", "check").exit_code == 0
    headers = {"Authorization": f"Bearer {key}"}
    with ThreadPoolExecutor(CALLERS) as callers:
        got = list(callers.map(lambda _: httpx.get(f"{address}/api/v1/tasks", headers=headers), range(CALLERS * 3)))
    assert {answer.status_code for answer in got} == {200}
    assert len({answer.text for answer in got}) == 1, "each session shows the same"


def test_a_scheduler_behind_the_pooler_reports_the_misconfiguration(
    pooled_url: str, redis_url: str, tmp_path: Path
) -> None:
    with closing(Stack(pooled_url, redis_url, tmp_path)) as stack, using(project.app, stack):
        scheduler = stack.scheduler(wait=False)
        eventually(
            lambda: scheduler.logged("service.misconfigured: There is a pooler between"), f"it says so: {scheduler.log}"
        )
        checks = json.loads(stack.command("doctor", "--json").output)["checks"]
        assert {check["check"]: check["level"] for check in checks}["pooler"] == "warn"
