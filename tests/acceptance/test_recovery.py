"""Any process may die: no task is lost, and no outcome is recorded twice."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import project
import pytest

from orchestrator import TaskFailed
from orchestrator.transport.announcements import list_standbys
from orchestrator.transport.keys import Keys
from tests.acceptance.stack import Stack
from tests.waiting import eventually

RESULTS = "SELECT count(*), count(DISTINCT id) FROM orchestrator.ended_tasks WHERE status = 'success'"


@pytest.fixture
def settings() -> dict[str, float]:
    """Short timeouts, so that the tests take little time."""
    return {"worker_ttl": 2.0, "heartbeat": 0.5, "lease": 2.0}


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def started_by(path: Path, count: int = 1) -> list[int]:
    """Wait until the task has started `count` times; return the process ids."""
    eventually(lambda: len(lines(path)) >= count, f"{count} starts in {path.name}")
    return [int(line) for line in lines(path)]


def all_succeed_once(stack: Stack, count: int, timeout: float = 60.0) -> None:
    eventually(lambda: stack.scalar("SELECT count(*) FROM orchestrator.ended_tasks") == count, "all end", timeout)
    assert stack.sql(RESULTS) == [(count, count)]
    assert stack.scalar("SELECT count(*) FROM orchestrator.tasks") == 0
    assert stack.scalar("SELECT coalesce(sum(failures), 0) FROM orchestrator.ended_tasks") == 0


def loss_message(stack: Stack) -> str:
    """Return the recorded error of the one lost attempt."""
    return str(stack.scalar("SELECT error ->> 'message' FROM orchestrator.attempts WHERE outcome = 'lost'"))


def test_a_killed_process_loses_no_task(stack: Stack, tmp_path: Path) -> None:
    scheduler = stack.scheduler()
    worker = stack.worker()
    handle = project.held.enqueue(str(tmp_path / "started"), str(tmp_path / "go"))
    first = started_by(tmp_path / "started")[0]
    os.kill(first, signal.SIGKILL)
    second = started_by(tmp_path / "started", 2)[1]
    (tmp_path / "go").touch()
    assert handle.result(60) == second != first
    eventually(lambda: worker.logged("tasks=1: its tasks run again"), "its parent says so")
    eventually(
        lambda: scheduler.logged("its process died: signal 9 (SIGKILL)' attempts=1"),
        "the leader does not wait until it counts as lost",
    )
    assert loss_message(stack).startswith("The process that ran this attempt died: signal 9 (SIGKILL). ")
    all_succeed_once(stack, 1)
    assert stack.sql("SELECT outcome FROM orchestrator.attempts") == [("lost",)]


def test_a_killed_machine_loses_no_task(stack: Stack, tmp_path: Path) -> None:
    scheduler = stack.scheduler()
    first = stack.worker()
    handle = project.held.enqueue(str(tmp_path / "started"), str(tmp_path / "go"))
    started_by(tmp_path / "started")
    stack.worker()
    first.kill()
    started_by(tmp_path / "started", 2)
    (tmp_path / "go").touch()
    handle.result(60)
    all_succeed_once(stack, 1)
    assert scheduler.log.read_text().count("reason='not heard from for ") == 1
    assert loss_message(stack).startswith("The worker that had this attempt was not heard from for ")


@pytest.mark.parametrize("machine", [False, True])
def test_a_task_that_must_not_start_twice_fails_when_lost(stack: Stack, tmp_path: Path, machine: bool) -> None:
    stack.scheduler()
    first = stack.worker()
    started = str(tmp_path / "started")
    handle = project.held.options(on_loss="fail", retries=2).enqueue(started, str(tmp_path / "go"))
    (process,) = started_by(tmp_path / "started")
    stack.worker()
    if machine:
        first.kill()
    else:
        os.kill(process, signal.SIGKILL)
    with pytest.raises(TaskFailed, match="It is not started again") as caught:
        handle.result(60)
    assert caught.value.kind == "WorkerLost"
    assert len(lines(tmp_path / "started")) == 1
    (tmp_path / "go").touch()
    handle.retry()
    assert handle.result(60) != process


def test_an_isolated_task_dies_with_its_worker(stack: Stack, tmp_path: Path) -> None:
    stack.scheduler()
    stack.worker()
    task = project.held.options(isolation="process")
    handle = task.enqueue(str(tmp_path / "started"), str(tmp_path / "go"))
    isolated = started_by(tmp_path / "started")[0]
    worker = int(Path(f"/proc/{isolated}/status").read_text().partition("PPid:")[2].split()[0])
    os.kill(worker, signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{isolated}").exists(), "the child dies with the worker")
    started_by(tmp_path / "started", 2)
    (tmp_path / "go").touch()
    handle.result(60)
    all_succeed_once(stack, 1)


@pytest.mark.parametrize("settings", [{"worker_ttl": 5.0, "heartbeat": 0.5}])
def test_a_long_task_runs_once_while_its_worker_lives(stack: Stack, tmp_path: Path) -> None:
    stack.scheduler()
    stack.worker(processes=2)
    handle = project.held.enqueue(str(tmp_path / "started"), str(tmp_path / "go"))
    started_by(tmp_path / "started")
    deadline = time.monotonic() + 1.2 * stack.settings.worker_ttl
    eventually(lambda: time.monotonic() > deadline, "whoever is silent would be lost by now")
    (tmp_path / "go").touch()
    handle.result(60)
    assert len(lines(tmp_path / "started")) == 1


def test_a_task_that_kills_its_process_fails_and_other_tasks_succeed(stack: Stack, tmp_path: Path) -> None:
    stack.scheduler()
    stack.worker(processes=2)
    culprit = project.kills_its_process.enqueue(str(tmp_path / "kills"))
    neighbours = project.app.enqueue_many(project.add, [(number, 0) for number in range(200)])
    with pytest.raises(TaskFailed, match="The process that ran this attempt died") as caught:
        culprit.result(60)
    assert caught.value.kind == "WorkerLost"
    assert len(lines(tmp_path / "kills")) == 1 + stack.settings.loss_limit
    assert [handle.result(60) for handle in neighbours] == list(range(200))
    assert stack.sql("SELECT failures, losses FROM orchestrator.ended_tasks WHERE status = 'failed'") == [(0, 3)]


def test_a_killed_leader_loses_no_task_and_records_none_twice(stack: Stack, tmp_path: Path) -> None:
    for _ in range(2):
        stack.scheduler()
    stack.worker(processes=2)
    path = tmp_path / "log"
    run = project.app.start_many(project.logged, [(str(path), number) for number in range(4_000)])
    for threshold in (500, 1_500, 2_500):
        eventually(partial(lambda limit: run.progress().counters.success >= limit, threshold), f"{threshold} tasks")
        stack.leader().kill()
        stack.scheduler()
    assert run.wait_ended(60) == "success"
    all_succeed_once(stack, 4_000)
    assert sorted(set(map(int, lines(path)))) == list(range(4_000))
    assert stack.scalar("SELECT term >= 4 FROM orchestrator.leases") is True


def standby_pids(stack: Stack) -> list[int]:
    """Return the process ids of the announced standbys."""
    return [int(one.address.rpartition(":")[2]) for one in list_standbys(stack.redis, Keys())]


@pytest.mark.parametrize("settings", [{"lease": 60.0}])
def test_only_one_of_two_schedulers_leads(stack: Stack) -> None:
    schedulers = [stack.scheduler(), stack.scheduler()]
    stack.worker(processes=2)
    run = project.app.start_many(project.noop, [()] * 2_000)
    assert run.wait_ended(60) == "success"
    assert sum(scheduler.logged("scheduler.leading term=") for scheduler in schedulers) == 1
    assert stack.scalar("SELECT term FROM orchestrator.leases") == 1
    standby = next(scheduler for scheduler in schedulers if scheduler is not stack.leader())
    eventually(lambda: standby_pids(stack) == [standby.pid], "people see who stands by")
    stack.leader().stop()
    eventually(lambda: standby.logged("scheduler.leading term=2"), "the standby takes over")
    eventually(lambda: standby_pids(stack) == [], "and people see that nobody does")
    assert project.add.enqueue(1, 1).result(60) == 2


class TestLongLease:
    """A lease that is too long to wait for."""

    @pytest.fixture
    def settings(self) -> dict[str, float]:
        return {"lease": 120.0}

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["told", "terminal closed"])
    def test_a_leader_that_stops_wakes_the_standby(self, stack: Stack, number: signal.Signals) -> None:
        first = stack.scheduler()
        eventually(lambda: first.logged("scheduler.leading term=1"), "the first leads")
        second = stack.scheduler()
        listening = """SELECT count(*) FROM pg_stat_activity WHERE query = 'LISTEN "orchestrator"'"""
        eventually(lambda: stack.scalar(listening) == 2, "both listen")
        first.signal(number)
        assert first.wait() == 0
        eventually(lambda: second.logged("scheduler.leading term=2"), "the standby takes over")
        assert second.stop() == 0, "and stops in good order"


def test_a_leader_that_was_stopped_past_its_lease_steps_down(stack: Stack) -> None:
    first = stack.scheduler()
    stack.worker(processes=2)
    run = project.app.start_many(project.noop, [()] * 3_000)
    eventually(lambda: run.progress().counters.success > 300, "some tasks")
    first.signal(signal.SIGSTOP)
    second = stack.scheduler()
    eventually(lambda: second.logged("scheduler.leading term=2"), "the second leads")
    first.signal(signal.SIGCONT)
    assert run.wait_ended(60) == "success"
    said = ("scheduler.deposed", "Postgres cannot be used", "in one tick")  # depends on where it was stopped
    eventually(lambda: any(map(first.logged, said)), "the first stands by")
    all_succeed_once(stack, 3_000)
    assert stack.leader() is second


@pytest.mark.parametrize("settings", [{"worker_ttl": 4.0, "heartbeat": 0.5}])
def test_a_run_survives_flushall(stack: Stack, tmp_path: Path) -> None:
    stack.scheduler()
    stack.worker(processes=2)
    holding = project.held.enqueue(str(tmp_path / "started"), str(tmp_path / "go"))
    started_by(tmp_path / "started")
    run = project.app.start_many(project.logged, [(str(tmp_path / "log"), number) for number in range(1_000)])
    for threshold in (100, 500):
        eventually(partial(lambda limit: run.progress().counters.success >= limit, threshold), f"{threshold} tasks")
        stack.redis.flushall()
    assert run.wait_ended(60) == "success"
    assert set(map(int, lines(tmp_path / "log"))) == set(range(1_000))
    (tmp_path / "go").touch()
    holding.result(60)
    assert len(lines(tmp_path / "started")) == 1, "a living worker had it"
    all_succeed_once(stack, 1_001)


@pytest.mark.parametrize("left", ["1-1-cafe", "9-3-cafe"])
def test_workers_leave_the_generation_of_a_lost_database(stack: Stack, left: str) -> None:
    """Redis has a generation of a lost Postgres, with the number of the new one's first generation, or a later one."""
    keys = Keys()
    stack.redis.set(keys.generation, left)
    stack.redis.set(keys.server, stack.redis.info("server")["run_id"])
    stack.redis.xadd(keys.events(left), {"d": ""})
    stack.worker(wait=False)
    eventually(lambda: stack.redis.exists(keys.queue(left, "default")), "the worker has joined it")
    stack.scheduler()
    assert project.add.enqueue(1, 2).result(60) == 3


def test_a_resumed_worker_drops_its_lost_task_and_works_again(stack: Stack, tmp_path: Path) -> None:
    scheduler = stack.scheduler()
    first = stack.worker()
    handle = project.held.enqueue(str(tmp_path / "started"), str(tmp_path / "go"))
    started_by(tmp_path / "started")
    second = stack.worker()
    first.signal_group(signal.SIGSTOP)
    started_by(tmp_path / "started", 2)
    assert scheduler.log.read_text().count("reason='not heard from for ") == 1
    assert loss_message(stack).startswith("The worker that had this attempt was not heard from for ")
    first.signal_group(signal.SIGCONT)
    eventually(lambda: first.logged("worker.cut_off"), "it asks")
    (tmp_path / "go").touch()
    handle.result(60)
    assert len(lines(tmp_path / "started")) == 2
    all_succeed_once(stack, 1)
    assert second.stop() == 0
    many = project.app.enqueue_many(project.add, [(number, 0) for number in range(300)])
    assert [each.result(60) for each in many] == list(range(300)), "the first works again"


def test_a_drain_finishes_running_tasks_and_returns_the_rest(stack: Stack, tmp_path: Path) -> None:
    stack.scheduler()
    worker = stack.worker("--concurrency", "2")
    run = project.app.start_many(project.held, [(str(tmp_path / "started"), str(tmp_path / "go"))] * 5)
    started_by(tmp_path / "started", 2)
    worker.signal(signal.SIGTERM)
    eventually(lambda: worker.logged("draining"), "it drains")
    (tmp_path / "go").touch()
    assert worker.wait(60) == 0
    assert "worker.stopped attempts_returned=" in worker.log.read_text().splitlines()[-1]
    eventually(lambda: run.progress().counters.success == 2, "two ended")
    assert stack.scalar("SELECT sum(failures + losses) FROM orchestrator.tasks") == 0
    stack.worker()
    assert run.wait_ended(60) == "success"
    all_succeed_once(stack, 5)


@pytest.mark.parametrize("settings", [{"drain_timeout": 600.0}])
def test_a_drain_does_not_wait_for_a_dead_scheduler(stack: Stack, tmp_path: Path) -> None:
    scheduler = stack.scheduler()
    worker = stack.worker()
    handle = project.held.enqueue(str(tmp_path / "started"), str(tmp_path / "go"))
    started_by(tmp_path / "started")
    scheduler.kill()
    (tmp_path / "go").touch()
    worker.signal(signal.SIGTERM)
    assert worker.wait(100) == 0, "though it has 600 s to drain"
    assert worker.logged("the last reports wait in Redis")
    stack.scheduler()
    assert handle.result(60) > 0, "the next scheduler finds the report"
    assert len(lines(tmp_path / "started")) == 1


class TestDrainTimeout:
    """Tasks that still run when the drain timeout is over."""

    @pytest.fixture
    def settings(self) -> dict[str, float]:
        return {"worker_ttl": 2.0, "heartbeat": 0.5, "drain_timeout": 0.5}

    def test_a_running_task_is_returned_and_runs_elsewhere_uncharged(self, stack: Stack, tmp_path: Path) -> None:
        stack.scheduler()
        worker = stack.worker()
        handle = project.held.enqueue(str(tmp_path / "started"), str(tmp_path / "go"))
        started_by(tmp_path / "started")
        worker.signal(signal.SIGTERM)
        assert worker.wait(60) == 0
        assert worker.logged("worker.stopped attempts_returned=1\n")
        eventually(lambda: handle.status() == "pending", "it is handed back")
        stack.worker()
        started_by(tmp_path / "started", 2)
        (tmp_path / "go").touch()
        handle.result(60)
        all_succeed_once(stack, 1)
        assert stack.sql("SELECT outcome FROM orchestrator.attempts") == [("returned",)]


def test_a_burst_worker_empties_the_queue_and_exits(stack: Stack) -> None:
    stack.scheduler()
    handles = project.app.enqueue_many(project.add, [(number, 0) for number in range(500)])
    worker = stack.worker("--burst", wait=False)
    assert worker.wait(40) == 0
    assert [handle.result(60) for handle in handles] == list(range(500))
