"""`orchestrator dev` serves all queues that the application names, and warns of the rest."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from functools import partial
from pathlib import Path

import httpx
import pytest

from orchestrator.embedded import EmbeddedServices
from tests import forking
from tests.integration.test_cli import Dev
from tests.waiting import eventually

SHOP = """
from orchestrator import Orchestrator

app = Orchestrator(routes={"shop.mail": "mail"})


@app.task(queue="images")
def resize(path: str) -> str:
    return path.upper()


@app.task
def mail(to: str) -> str:
    return to
"""
FLOW = "name: flow\nqueue: reports\ntasks: {a: {task: shop.resize, input: {path: a}, queue: wide}}\n"
SCHEDULED = """

@app.schedule(cron="0 3 * * *")
@app.task
def nightly() -> None: ...
"""


class Project:
    """A folder with an application and its own namespace, in which commands run."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.environment = environment
        self.write("shop.py", SHOP)

    def write(self, name: str, text: str) -> None:
        """Write a file atomically, because `dev` watches it."""
        beside = self.folder / f"{name}.new"
        beside.write_text(text, encoding="utf-8")
        beside.rename(self.folder / name)

    def run(self, *words: str) -> str:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ORCHESTRATOR_")}
        done = forking.run(*words, environment={**inherited, **self.environment}, folder=self.folder, timeout=150)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def dev(self) -> Dev:
        return Dev(self.folder, "--app", "shop:app", **self.environment)


def stop(dev: Dev) -> None:
    """Stop `dev` and its servers cleanly."""
    dev.process.send_signal(signal.SIGTERM)
    assert dev.process.wait(60) == 0


@pytest.fixture
def project(tmp_path: Path, database_url: str, redis_url: str) -> Project:
    """A project that shares the servers of the tests."""
    return Project(
        tmp_path,
        ORCHESTRATOR_DATABASE_URL=database_url,
        ORCHESTRATOR_REDIS_URL=redis_url,
        ORCHESTRATOR_NAMESPACE="developing",
    )


@pytest.mark.long
def test_dev_serves_every_queue_that_the_application_names(project: Project) -> None:
    with project.dev() as dev:
        dev.wait_for("queues=default,images,mail concurrency=10")
        assert project.run("enqueue", "resize", "a.png", "--wait") == '"A.PNG"\n'
        assert project.run("enqueue", "mail", "ann", "--wait") == '"ann"\n'

        project.write("flow.yaml", FLOW)
        project.run("workflows", "apply", "flow.yaml")
        dev.wait_for("a workflow names wide: starting a worker for that")
        project.run("runs", "start", "flow", "--wait")

        project.write("shop.py", SHOP.replace('"images"', '"pictures"'))
        dev.wait_for("queues=default,mail,pictures concurrency=10")
        assert project.run("enqueue", "resize", "b.png", "--wait") == '"B.PNG"\n'

        project.run("enqueue", "resize", "c.png", "--queue", "picturs")
        dev.wait_for("WARNING Queue 'picturs' has ready tasks and no live worker. Start one:")
        project.run("enqueue", "shop.resise", "c.png", "--app", "")
        dev.wait_for("WARNING No live worker of queue 'default' knows 'shop.resise'")

        stop(dev)
    with project.dev() as dev:
        dev.wait_for("queues=default,mail,pictures,wide concurrency=10")
        stop(dev)


@pytest.mark.long  # every build runs the README's commands, with servers of their own
def test_dev_starts_services_reloads_code_and_stops_everything(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # Postgres may have to run as another user
    project = Project(tmp_path)
    with project.dev() as dev:
        dev.wait_for("✓ ready")
        said = dev.said.read_text(encoding="utf-8")
        [address] = re.findall(r"api.ready docs=(http://\S+)/docs", said)
        assert httpx.get(f"{address}/readyz", timeout=5.0).status_code == 200
        assert "scheduler.leading term=1" in said
        assert "process.ready" in said
        assert re.search(
            r"Postgres \d+[.\d]* \(.*\) has started in .*\n.*(Redis|Valkey) \d+[.\d]* \(.*\) has started in ", said
        )
        services = tmp_path / ".orchestrator" / "services.json"
        assert json.loads(services.read_text(encoding="utf-8"))["pid"] == dev.process.pid
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ORCHESTRATOR_")}
        below = tmp_path / "below"
        below.mkdir()
        found = forking.run("status", "--json", environment=clean, folder=below)
        assert json.loads(found.stdout)["leader"]["term"] == 1
        second = forking.run("dev", environment=clean, folder=tmp_path)
        assert second.returncode == 1
        assert f"already running, started by process {dev.process.pid}" in second.stderr
        project.write("shop.py", SHOP + SCHEDULED)
        dev.wait_for("shop.nightly: next fire")
        project.write("shop.py", SHOP + "(")
        dev.wait_for("the worker waits for the next change of a file")
        project.write("shop.py", SHOP)
        dev.wait_for("shop.nightly/default: no longer in the code of shop:app; deleted.")
        assert "shop.nightly" not in project.run("schedules", "list")
        project.run("workers", "drain", eventually(partial(last_worker, project), "it is announced"))
        dev.wait_for("the worker was drained: restarting it")
        assert project.run("enqueue", "resize", "a.png", "--wait") == '"A.PNG"\n'
        stop(dev)
        said = dev.said.read_text(encoding="utf-8")
        assert said.count("SyntaxError") == 1, "the worker says it, and nobody else"
        stops = ("stopping the scheduler", "scheduler.stopped", "stopping the services")
        assert sorted(stops, key=said.index) == [*stops]
    assert not services.exists()


@pytest.mark.long
def test_a_second_start_logs_no_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # Postgres may have to run as another user
    project = Project(tmp_path)
    for _ in range(2):
        with project.dev() as dev:
            dev.wait_for("process.ready")
            assert project.run("enqueue", "resize", "a.png", "--wait") == '"A.PNG"\n'
            stop(dev)
        said = dev.said.read_text(encoding="utf-8")
    assert not re.search("^scheduler .* WARNING ", said, re.MULTILINE), said
    assert "lost" not in said


@pytest.mark.long
def test_dev_restarts_killed_servers(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # Postgres may have to run as another user
    project, services = Project(tmp_path), EmbeddedServices(tmp_path / ".orchestrator")
    with project.dev() as dev:
        dev.wait_for("process.ready")
        (redis,) = services.redis._leftovers()
        postgres = int(services.postgres._pid_file.read_text(encoding="utf-8").split()[0])
        for server, title, word in ((redis, "Redis", "a"), (postgres, "Postgres", "b")):
            os.kill(server, signal.SIGKILL)
            dev.wait_for(f"{title} has ended: restarting it")
            assert eventually(partial(said, project, word), "a task runs again", 120.0) == f'"{word.upper()}"\n'
        stop(dev)


@pytest.mark.long
def test_dev_restarts_a_scheduler_that_is_killed_repeatedly(project: Project) -> None:
    project.run("db", "upgrade")
    with project.dev() as dev:
        for number in range(1, 6):
            eventually(lambda: dev.said.read_text(encoding="utf-8").count("scheduler.ready") == number, "it starts")  # noqa: B023
            os.kill(scheduler_of(dev), signal.SIGKILL)
        dev.wait_for("the scheduler was killed by signal 9: restarting it")
        dev.wait_for("the scheduler was killed by signal 9, 2 times within 30 s: restarting it in 1 s")
        assert project.run("enqueue", "resize", "a.png", "--wait") == '"A.PNG"\n'
        stop(dev)


def scheduler_of(dev: Dev) -> int:
    children = Path(f"/proc/{dev.process.pid}/task/{dev.process.pid}/children").read_text(encoding="utf-8").split()
    (found,) = [one for one in children if b"\0scheduler\0" in Path(f"/proc/{one}/cmdline").read_bytes()]
    return int(found)


def last_worker(project: Project) -> str | None:
    """Return the id of the live worker, if there is exactly one."""
    live = [one["id"] for one in json.loads(project.run("workers", "--json"))["workers"] if one["state"] == "live"]
    return str(live[0]) if len(live) == 1 else None


def said(project: Project, word: str) -> str:
    """Return the result of a task, or an empty string while the servers are down."""
    try:
        return project.run("enqueue", "resize", word, "--wait")
    except AssertionError:
        return ""


def test_a_worker_warns_of_queues_that_it_does_not_serve(project: Project) -> None:
    project.run("db", "upgrade")
    environment = {**os.environ, **project.environment}
    words = ("worker", "--app", "shop:app", "--processes", "1")
    with forking.begin(*words, environment=environment, folder=project.folder, stderr=subprocess.PIPE) as worker:
        assert worker.stderr is not None
        lines = iter(worker.stderr.readline, "")
        assert "queues=default concurrency=10" in next(line for line in lines if "ready" in line)
        assert "queues=images, mail: " in next(line for line in lines if "worker.queues_not_served" in line)
        worker.terminate()
