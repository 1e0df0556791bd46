"""Several leaders, with real processes: every task runs once in any shard, and users see one system."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID
from zlib import crc32

import httpx
import project
import pytest
import sharing

from orchestrator import Duplicate, Handle
from orchestrator.domain.fleet.announced import Standby
from orchestrator.monitoring.system import SystemGauges
from orchestrator.sdk.dag.definitions import loads
from orchestrator.store import database, shards
from orchestrator.transport.announcements import announce
from orchestrator.transport.keys import Keys
from orchestrator.transport.worker import WorkerStreams
from orchestrator.workers.parent.beating import Heartbeats
from orchestrator.workers.spec import WorkerSpec
from tests.acceptance.conftest import SHARDS, sharded_stack
from tests.acceptance.stack import Stack, using
from tests.acceptance.ways import use_route
from tests.waiting import eventually

SHARING = ("--app", "sharing:app", "--queues", "default,limited")


def per_shard(stack: Stack, table: str, number: int = SHARDS) -> list[int]:
    root = stack.settings.root
    schemas = [root, *(f"{root}/{one}" for one in range(1, number))]
    return [stack.scalar(f'SELECT count(*) FROM "{schema}".{table}') for schema in schemas]


def leaders(stack: Stack) -> list[tuple[int, str]]:
    return [
        (shard, leader)
        for shard, leader in stack.sql(f'SELECT shard, leader FROM "{stack.settings.root}".shards ORDER BY shard')
        if leader
    ]


def start(stack: Stack, *options: str) -> None:
    stack.scheduler()
    stack.worker(*options, processes=SHARDS)
    eventually(lambda: len(leaders(stack)) == SHARDS, "each shard has a leader")


@pytest.fixture(scope="module")
def started(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder, namespace = tmp_path_factory.mktemp("shards"), f"shards_{uuid.uuid4().hex[:8]}"
    with sharded_stack(database_url, redis_url, folder, namespace, SHARDS) as stack:
        start(stack, "--database")
        stack.worker(*SHARING, processes=SHARDS)
        yield stack


@pytest.fixture
def running(started: Stack) -> Iterator[Stack]:
    """Two shards with a scheduler, and a worker of each application, for tests that disturb nothing."""
    with using(project.app, started), using(sharing.app, started):
        yield started


@contextmanager
def growing(stack: Stack, table: str, least: int = 1) -> Iterator[None]:
    """Assert that each shard has at least `least` more rows at the end of the block."""
    before = per_shard(stack, table)
    yield
    assert min(after - then for then, after in zip(before, per_shard(stack, table), strict=True)) >= least


def test_tasks_of_all_shards_run_and_appear_in_one_list(sharded: Stack) -> None:
    start(sharded)
    handles = [project.add.enqueue(number, 1) for number in range(40)]
    assert [handle.result(timeout=60) for handle in handles] == list(range(1, 41))
    many = project.app.enqueue_many(project.add, [(number, 2) for number in range(10)])
    assert [handle.result(timeout=60) for handle in many] == list(range(2, 12))
    assert min(per_shard(sharded, "ended_tasks")) > 5
    assert len(json.loads(sharded.output_of("tasks", "list", "--limit", "100", "--json"))["tasks"]) == 50
    for handle in handles[:5]:
        assert json.loads(sharded.output_of("tasks", "show", handle.id, "--json"))["id"] == handle.id

    def status() -> Any:
        return json.loads(sharded.output_of("status", "--json"))

    eventually(lambda: status()["ended_last_hour"]["success"] == 50, "the leaders have written down what ended")
    assert status()["workers"] == SHARDS


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_tasks_complete_in_transactions_of_their_shard(running: Stack, isolation: Any) -> None:
    """Also in an isolated process, where each task runs after a loss."""
    task = project.in_one_transaction.options(isolation=isolation)
    with growing(running, "ended_tasks"):
        results = [task.enqueue(number, 1).result(timeout=60) for number in range(8)]
    children = [project.app.handle(result.split()[1]).result(timeout=60) for result in results]
    assert children == list(range(1, 9))


def test_programs_reach_all_shards_over_http(sharded: Stack) -> None:
    start(sharded)
    use_route("http", sharded, project.app)
    handles = [project.add.enqueue(number, 1) for number in range(12)]
    assert [handle.result(timeout=60) for handle in handles] == list(range(1, 13))
    assert min(per_shard(sharded, "ended_tasks")) > 0
    later = [project.add.options(delay=3600.0).enqueue(number, 1) for number in range(6)]
    for handle in later:
        handle.cancel()
    eventually(lambda: {handle.status() for handle in later} == {"cancelled"}, "all are cancelled")


def test_cancels_and_results_find_the_shard_of_a_task(running: Stack) -> None:
    with growing(running, "tasks"):
        later = [project.add.options(delay=3600.0).enqueue(number, 1) for number in range(10)]
    for handle in later:
        handle.cancel()
    eventually(lambda: {handle.status() for handle in later} == {"cancelled"}, "all are cancelled")
    running.output_of("queues", "pause", "default")
    waiting = [project.add.enqueue(number, 1) for number in range(10)]
    running.output_of("queues", "resume", "default")
    assert [handle.result(timeout=60) for handle in waiting] == list(range(1, 11))


def test_a_unique_key_holds_for_all_shards(running: Stack) -> None:
    running.output_of("queues", "pause", "default")
    same = {project.add.options(unique_key=f"key {number % 5}").enqueue(number, 1) for number in range(40)}
    assert len(same) == 5
    running.output_of("queues", "resume", "default")
    assert sorted(handle.result(timeout=60) for handle in same) == [1, 2, 3, 4, 5]


def test_a_dead_leader_is_replaced_without_lost_or_repeated_tasks(sharded: Stack) -> None:
    start(sharded)
    sharded.scheduler()
    log = sharded.folder / "done"
    handles = [project.total.enqueue([number], str(log), str(number)) for number in range(300)]
    for _, leader in leaders(sharded):
        os.kill(int(leader.rpartition(":")[2]), signal.SIGKILL)
    assert [handle.result(timeout=120) for handle in handles] == list(range(300))
    assert Counter(log.read_text().split()) == Counter(map(str, range(300)))


def schedulers_of(stack: Stack) -> Counter[int]:
    """Return how many shards each scheduler leads, by its process id."""
    pids = [leader.rpartition(":")[2] for _, leader in leaders(stack)]
    return Counter(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids)


def test_schedulers_share_the_shards_evenly_and_hand_them_over(sharded: Stack) -> None:
    first = sharded.scheduler()
    eventually(lambda: schedulers_of(sharded) == {first.pid: 2}, "the first leads both shards")
    second = sharded.scheduler()
    eventually(lambda: schedulers_of(sharded) == {first.pid: 1, second.pid: 1}, "each leads one")
    sharded.worker(processes=SHARDS)
    handles = [project.add.enqueue(number, 1) for number in range(40)]
    assert first.stop() == 0
    eventually(lambda: schedulers_of(sharded) == {second.pid: 2}, "the second leads both", timeout=2.0)
    assert [handle.result(timeout=60) for handle in handles] == list(range(1, 41))


def test_commands_name_a_shard_without_a_leader(sharded: Stack) -> None:
    start(sharded)
    shard_1 = dict(leaders(sharded))[1]
    os.kill(int(shard_1.rpartition(":")[2]), signal.SIGSTOP)
    eventually(lambda: len(leaders(sharded)) == 1, "the lease of shard 1 is over")

    def said(*command: str) -> str:
        return " ".join(sharded.command(*command).stdout.split())

    for command in ("status", "doctor"):
        assert "No scheduler leads shard 1, so no task starts there" in said(command)
    assert "No scheduler leads a shard" in said("top", "--once")
    metrics = httpx.get(f"{sharded.api()}/metrics").text
    assert float(re.findall(r"(?m)^orchestrator_lease_remaining_seconds (\S+)", metrics)[0]) < 0
    sharded.output_of("queues", "pause", "default")
    due = [project.add.options(delay=0.001).enqueue(number, 1) for number in range(10)]
    for task in [*due, *(project.add.enqueue(number, 1) for number in range(10))]:
        shard = sharded.scalar(f'SELECT shard FROM "{sharded.settings.root}".places WHERE id = :id', id=task.id)
        assert ("No scheduler leads shard 1" in said("tasks", "show", task.id)) == (shard == 1)
        obstacles = project.app._client.backend.tasks.obstacles(UUID(task.id).bytes)
        assert any(one.startswith("No scheduler leads shard 1") for one in obstacles) == (shard == 1)


def test_commands_show_all_shards_and_report_a_wrong_shard_count(sharded: Stack) -> None:
    start(sharded)
    eventually(lambda: json.loads(sharded.output_of("status", "--json"))["workers"] == SHARDS, "both workers are known")
    status = sharded.output_of("status")
    addresses = dict(leaders(sharded))
    assert all(sharded.processes[0].logged(f"scheduler.leading term=1 shard={number}") for number in addresses)
    assert f"0 led by {addresses[0]}; 1 led by {addresses[1]}" in " ".join(status.split())
    assert " 0 B" not in status
    assert "2 live worker processes" in sharded.command("doctor").stdout
    for number in (1, 3):
        sharded.environment["ORCHESTRATOR_SHARDS"] = str(number)
        said = [" ".join(sharded.command(command).stdout.split()) for command in ("status", "doctor")]
        assert ["and the database has 2" in one for one in said] == [True, True], (number, said)
    sharded.environment["ORCHESTRATOR_SHARDS"] = "1"
    scheduler = sharded.scheduler()
    wrong = "service.misconfigured: Setting shards is 1, and"
    assert scheduler.logged(f"{wrong} the database has 2. A process with this setting sees only these shards. Set ORCH")
    assert not any(process.logged("misconfigured") for process in sharded.processes[:2]), "these are right"
    streams = WorkerStreams(sharded.redis, Keys.of(sharded.settings))
    assert streams.shards_of_leader() == SHARDS, "which workers compare with their own"


def test_commands_include_shards_that_are_closing(sharded: Stack) -> None:
    tasks = [project.add.enqueue(1, 1) for _ in range(20)]
    assert min(per_shard(sharded, "tasks", SHARDS)) > 0
    assert "Shard 1 stays" in reshard(sharded, 1)[-1]
    status = json.loads(sharded.output_of("status", "--json"))
    assert sum(status["open"].values()) == len(tasks)
    assert not any("Setting shards" in one["message"] for one in status["trouble"])
    listed = sharded.output_of("tasks", "list", "--limit", "50")
    assert all(task.id in listed for task in tasks)


def test_a_worker_reports_a_shard_count_that_differs_for_a_minute(
    sharded: Stack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("orchestrator"), "propagate", True)
    keys = Keys.of(sharded.settings)

    def said(*found: tuple[float, int]) -> int:
        """Return how many warnings are logged if the leader announces these counts at these times."""
        caplog.clear()
        beating = Heartbeats(WorkerStreams(sharded.redis, keys), WorkerSpec(app="project:app"), sharded.settings)
        for now, number in found:
            sharded.redis.set(keys.canary, f"shards={number}", ex=60)
            beating.check_shards(now)
        wrong = f"Setting shards is {SHARDS}, but 1 at the leading scheduler"
        return len({id(one) for one in caplog.records if wrong in one.getMessage()})  # a record may be captured twice

    assert said((0, 1), (30, 1), (59, SHARDS), (90, SHARDS)) == 0
    assert said((0, 1), (59, 1)) == 0
    assert said((0, 1), (59, 1), (60, 1), (200, 1)) == 1


def test_status_and_metrics_show_trouble_in_any_shard(sharded: Stack) -> None:
    root, keys = sharded.settings.root, Keys.of(sharded.settings.of_shard(1))
    for schema, useful in ((root, "now()"), (f"{root}/1", "now() - interval '1 minute'")):
        sharded.execute_sql(f"""
            INSERT INTO "{schema}".leases (shard, owner, term, expires_at, address, useful_at, useful_term, trouble)
            VALUES (0, gen_random_uuid(), 1, now() + interval '1 hour', 'host:1', {useful}, 1, 'its disk is full')""")
    sharded.redis.xadd(keys.quarantine, {"d": b"?"})
    sharded.redis.set(keys.complaint, "Postgres does not let it in.")
    announce(sharded.redis, keys, "one", Standby(address="host:2", since=datetime.now(UTC)), 60)
    gauges = SystemGauges(sharded.settings)
    found: dict[str, Any] = {family.name: value for family in gauges.metrics() for _, value in family.samples}
    gauges.close()
    assert found["orchestrator_leader_idle_seconds"] >= 60
    assert found["orchestrator_quarantined_messages"] == 1
    status = json.loads(sharded.output_of("status", "--json"))
    said = {one["kind"]: one["message"] for one in status["trouble"]}
    assert said["leader in trouble"].startswith("The scheduler host:1 leads shard 1, but has done no work for 1m")
    assert "its disk is full" in said["leader in trouble"]
    assert said["set aside"].startswith("1 message could not")
    assert said["scheduler stuck"] == "Postgres does not let it in."
    assert [one["address"] for one in status["standbys"]] == ["host:2"]


def test_workflows_run_in_all_shards(running: Stack) -> None:
    path = running.folder / "counted"
    with growing(running, "runs"):
        runs = [sharing.twice.start(str(path), str(number)) for number in range(10)]
        assert [run.result(timeout=60) for run in runs] == [[f"{n}.0", f"{n}.1"] for n in range(10)]
    assert Counter(path.read_text().split()) == Counter(f"{n}.{m}" for n in range(10) for m in range(2))
    listening = [sharing.listens.starting(id=f"mine {number}").start() for number in range(6)]
    with pytest.raises(Duplicate):
        sharing.listens.starting(id="mine 0").start()
    sharing.passes_on.start([run.id for run in listening]).result(timeout=60)
    assert [run.result(timeout=60) for run in listening] == ["passed on"] * 6


def reshard(stack: Stack, number: int) -> list[str]:
    """Set the shard count of later processes; return the messages of the upgrade."""
    stack.settings = replace(stack.settings, shards=number)
    stack.environment["ORCHESTRATOR_SHARDS"] = str(number)
    return shards.upgrade(stack.settings)


def replace_processes(stack: Stack, number: int) -> None:
    """Start a new scheduler and worker, then stop the old processes."""
    before = [process for process in stack.processes if process.is_running()]
    stack.scheduler()
    stack.worker(processes=number)
    for process in before:
        assert process.stop() == 0


def test_shards_are_added_and_removed_under_load(sharded: Stack) -> None:
    log, stopping = sharded.folder / "done", threading.Event()
    handles: list[Handle[int]] = []

    def enqueue() -> None:
        while not stopping.wait(0.05):
            handles.append(project.total.enqueue([len(handles)], str(log), str(len(handles))))

    start(sharded)
    client = threading.Thread(target=enqueue)
    client.start()
    try:
        assert reshard(sharded, 3) == [f"The database is at revision {database.REVISION}."]
        replace_processes(sharded, 3)
        project.app._client._settings = sharded.settings
        project.app._client._backend = None  # the thread goes on with a new backend
        eventually(lambda: per_shard(sharded, "ended_tasks", 3)[2] > 5, "the third shard has tasks")
        notes = reshard(sharded, 1)
        assert [note.split(":")[0] for note in notes[1:]] == ["Shard 1 stays", "Shard 2 stays"]
        is_open = f'SELECT bool_or(is_open) FROM "{sharded.settings.root}".shards WHERE shard > 0'

        def are_closed() -> bool:
            """Return whether shards 1 and 2 get no task for longer than the client caches the open shards."""
            before, placed = per_shard(sharded, "ended_tasks", 3)[1:], len(handles)
            eventually(lambda: len(handles) > placed + 60, "the client goes on")
            return not sharded.scalar(is_open) and per_shard(sharded, "ended_tasks", 3)[1:] == before

        eventually(are_closed, "nothing is placed there any more")
        replace_processes(sharded, 1)
        notes = reshard(sharded, 1)
        assert [note.split(" and ")[0] for note in notes[1:]] == ["Shard 1 was empty", "Shard 2 was empty"]
        placed = len(handles)
        eventually(lambda: len(handles) > placed + 10, "the client goes on")
    finally:
        stopping.set()
        client.join()
    assert [handle.result(timeout=120) for handle in handles] == list(range(len(handles)))
    assert Counter(log.read_text().split()) == Counter(map(str, range(len(handles))))


# -- limits


def most_at_once(path: Path) -> int:
    """Return the maximum of tasks that ran at the same time, by the times that they logged."""
    moments = sorted((float(at), sign == "+") for sign, at in (line.split() for line in path.read_text().splitlines()))
    running = most = 0
    for _, begins in moments:
        running += 1 if begins else -1
        most = max(most, running)
    return most


def ended(stack: Stack, name: str) -> int:
    found: int = stack.scalar(
        f"SELECT count(*) FROM \"{stack.settings.root}/all\".ended_tasks WHERE name = :name AND status = 'success'",
        name=name,
    )
    return found


def test_a_limit_holds_for_all_shards_together(running: Stack) -> None:
    path = running.folder / "narrow"
    with growing(running, "ended_tasks", 11):
        for _ in range(12):
            sharing.spread.enqueue("narrow", str(path), 5)
        eventually(lambda: ended(running, "sharing.narrow") == 60, "all have run", timeout=120)
    assert most_at_once(path) == 2


def test_a_limit_of_a_queue_holds_for_all_shards_together(running: Stack) -> None:
    running.output_of("queues", "limit", "limited", "--concurrency", "3")
    path = running.folder / "queued"
    handles = [sharing.queued.enqueue(str(path)) for _ in range(60)]
    for handle in handles:
        handle.result(timeout=120)
    assert most_at_once(path) == 3


def test_a_rate_holds_for_all_shards_together(running: Stack) -> None:
    """Each shard has half of the tasks, so that two rates instead of one would take half as long."""
    path, each = running.folder / "slow", 12
    keys = {crc32(f"|{key}".encode()) % SHARDS: key for key in "abcdef"}
    with growing(running, "ended_tasks", 1 + each):
        for key in keys.values():
            sharing.spread.options(concurrency_key=key).enqueue("slow", str(path), each)
        eventually(lambda: ended(running, "sharing.slow") == SHARDS * each, "all have run", timeout=120)
    begun = sorted(float(line.split()[1]) for line in path.read_text().splitlines())
    assert begun[-1] - begun[0] > 0.9 * (SHARDS * each - 1) / 5


SCARCE = """
name: scarce
concurrency: {{limit: 2}}
tasks:
  only: {{task: sharing.queued, queue: default, input: {{path: "{path}"}}}}
"""


def test_the_concurrency_of_a_workflow_holds_for_all_shards_together(running: Stack) -> None:
    path = running.folder / "scarce"
    sharing.app.workflows.apply(loads(SCARCE.format(path=path)))
    with growing(running, "runs", 3):
        runs = [sharing.app.workflows["scarce"].start() for _ in range(16)]
        for run in runs:
            assert run.wait_ended(120) == "success"
    assert most_at_once(path) == 2
