"""Stopping, replacing and scaling worker processes: stubborn code, many tasks, much memory, load, new code."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import stubborn

from orchestrator import Handle, Retry, TaskCancelled, TaskFailed, TaskTimeout
from orchestrator.transport.codec import Heartbeat, decode, unpack_attempts
from orchestrator.transport.keys import Keys
from tests import forking
from tests.acceptance.stack import Process, Stack
from tests.waiting import eventually

APP = ("--app", "stubborn:app")
application = stubborn.app
SETTINGS = {"worker_ttl": 2.0, "heartbeat": 0.5, "stop_grace": 0.5, "scale_down_after": 0.5, "drain_timeout": 3.0} | {
    "turn_timeout": 0.5
}


def pids(path: Path, count: int = 1) -> list[int]:
    """Wait until tasks have started `count` times; return their process ids."""
    eventually(lambda: path.exists() and len(path.read_text().split()) >= count, f"{count} starts in {path.name}")
    return [int(line) for line in path.read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def tasks_in_heartbeat(stack: Stack, pid: int) -> set[bytes]:
    """Return the tasks that the heartbeat of a process lists."""
    keys = Keys()
    workers = cast("set[bytes]", stack.redis.smembers(keys.workers))
    beats = cast("list[bytes | None]", [stack.redis.get(keys.worker(worker.decode())) for worker in workers])
    return {
        task
        for beat in (decode(Heartbeat, value) for value in beats if value)
        if beat.pid == pid
        for task, _ in unpack_attempts(beat.held)
    }


def states(stack: Stack, worker: Process) -> list[str]:
    """Return the states of a worker's processes, oldest first, as the table `workers` shows them."""
    statement = "SELECT state FROM orchestrator.workers WHERE id LIKE :worker ORDER BY started_at"
    return [str(row[0]) for row in stack.sql(statement, worker=f"%-{worker.pid}-%")]


def charges(stack: Stack, *handles: Handle[Any]) -> tuple[int, int]:
    """Return the total failures and losses charged to these tasks."""
    statement = "SELECT sum(failures), sum(losses) FROM orchestrator.ended_tasks WHERE id = ANY(CAST(:ids AS uuid[]))"
    failures, losses = stack.sql(statement, ids=[handle.id for handle in handles])[0]
    return failures, losses


# -- soft timeouts


def test_a_task_can_catch_a_soft_timeout_and_fails_otherwise(life: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(life.environment, "ORCHESTRATOR_STOP_GRACE", "30")  # all code ends within it on a slow machine
    worker = life.worker(*APP)
    cleaning = [stubborn.cleans_up, stubborn.cleans_up_async]
    cleaning += [task.options(isolation="process") for task in cleaning]
    going_on = [stubborn.goes_on, stubborn.goes_on_async, stubborn.goes_on.options(isolation="process")]
    hopeless = stubborn.hopeless.enqueue()
    cleaned = [task.enqueue() for task in cleaning]
    failed = [task.enqueue() for task in going_on]
    assert [handle.result(60) for handle in cleaned] == ["cleaned up"] * 4
    for handle in failed:
        with pytest.raises(TaskFailed, match=r"ran longer than its soft timeout of 0\.3 s") as caught:
            handle.result(60)
        assert caught.value.kind == "orchestrator.errors.SoftTimeout"
    with pytest.raises(TaskFailed, match=r"ran longer than its timeout of 0\.3 s"):
        hopeless.result(60)
    assert charges(life, hopeless) == (1, 0), "a killed process is a timeout, of which the policy wants no second"
    assert states(life, worker) == ["live"], "nothing lingered, so no process was replaced"


# -- code that does not end


@pytest.mark.parametrize("task", [stubborn.swallows, stubborn.swallows_async], ids=["thread", "async"])
def test_a_process_is_replaced_when_a_task_ignores_its_timeout(
    life: Stack, tmp_path: Path, task: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(life.environment, "ORCHESTRATOR_DRAIN_TIMEOUT", "300")  # its successor may take long
    worker = life.worker(*APP)
    go, stop = str(tmp_path / "go"), str(tmp_path / "stop")
    neighbour = stubborn.held.enqueue(str(tmp_path / "neighbour"), go)
    old = pids(tmp_path / "neighbour")[0]
    handle = task.options(timeout=0.3).enqueue(str(tmp_path / "started"), stop)  # type: ignore[attr-defined]
    with pytest.raises(TaskFailed, match=r"ran longer than its timeout of 0\.3 s") as caught:
        handle.result(60)
    assert caught.value.kind == "orchestrator.errors.TaskTimeout"
    eventually(lambda: worker.logged("process.ready", 2), "a fresh process stands in")
    assert stubborn.pid.enqueue().result(60) != old
    eventually(lambda: states(life, worker) == ["draining", "live"], "the old one drains")
    late = bytes.fromhex(handle.id.replace("-", ""))
    eventually(lambda: late in tasks_in_heartbeat(life, old), "its code runs, and counts")
    Path(go).touch()
    assert neighbour.result(60) == old, "what ran beside it was not disturbed"
    eventually(lambda: not is_alive(old), "then the old process ends, and with it the code")
    eventually(lambda: states(life, worker) == ["stopped", "live"], "which is no death")
    assert (charges(life, handle), charges(life, neighbour)) == ((1, 0), (0, 0))


def test_a_timed_out_task_in_a_blocking_call_delays_no_runs(
    life: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(life.environment, "ORCHESTRATOR_STOP_GRACE", "60")
    life.worker(*APP)
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    handle = stubborn.waits_for_a_writer.options(timeout=0.1).enqueue(str(tmp_path / "started"), pipe)
    old = pids(tmp_path / "started")[0]
    told_by = time.monotonic() + 1.0  # on a busy machine the timeout may come later, and the test shows less
    while time.monotonic() < told_by:
        assert stubborn.asks.start().result(60) == old
    assert stubborn.asks.start().result(60) == old, "runs go on in the process whose task was told to end"
    writer = os.open(pipe, os.O_RDWR)
    with pytest.raises(TaskFailed, match=r"ran longer than its timeout of 0\.1 s"):
        handle.result(60)
    os.close(writer)


def test_a_timed_out_task_frees_its_slot_when_its_code_ends(
    life: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(life.environment, "ORCHESTRATOR_DRAIN_TIMEOUT", "300")
    life.worker(*APP)
    neighbour = stubborn.held.enqueue(str(tmp_path / "neighbour"), str(tmp_path / "go"))
    old = pids(tmp_path / "neighbour")[0]
    handle = stubborn.swallows.options(timeout=0.3).enqueue(str(tmp_path / "started"), str(tmp_path / "stop"))
    with pytest.raises(TaskFailed):
        handle.result(60)
    late = bytes.fromhex(handle.id.replace("-", ""))
    eventually(lambda: late in tasks_in_heartbeat(life, old), "its code runs, and counts")
    (tmp_path / "stop").touch()
    eventually(lambda: late not in tasks_in_heartbeat(life, old), "the code has ended")
    assert handle.status() == "failed", "its late return changes nothing"
    (tmp_path / "go").touch()
    neighbour.result(60)


def test_a_task_that_holds_the_gil_is_killed_with_its_process(life: Stack, tmp_path: Path) -> None:
    worker = life.worker(*APP)
    neighbour = stubborn.held.enqueue(str(tmp_path / "neighbour"), str(tmp_path / "go"))
    pids(tmp_path / "neighbour")
    handle = stubborn.keeps_the_interpreter.options(timeout=0.3).enqueue(str(tmp_path / "started"))
    with pytest.raises(TaskFailed, match=r"ran longer than its timeout of 0\.3 s") as caught:
        handle.result(60)
    assert caught.value.kind == "orchestrator.errors.TaskTimeout"
    eventually(lambda: worker.logged(": a task must stop"), "it is told")
    pids(tmp_path / "neighbour", 2)
    (tmp_path / "go").touch()
    neighbour.result(60)
    assert (charges(life, handle), charges(life, neighbour)) == ((1, 0), (0, 0))
    # Cancellation ends the same code in the same way.
    cancelled = stubborn.keeps_the_interpreter.enqueue(str(tmp_path / "again"))
    stuck = pids(tmp_path / "again")[0]
    cancelled.cancel()
    with pytest.raises(TaskCancelled):
        cancelled.result(60)
    eventually(lambda: not is_alive(stuck), "its process is killed")
    assert stubborn.pid.enqueue().result(60) != stuck


def test_a_worker_stops_although_a_task_holds_the_gil(life: Stack, tmp_path: Path) -> None:
    worker = life.worker(*APP)
    handle = stubborn.keeps_the_interpreter.enqueue(str(tmp_path / "started"))
    pids(tmp_path / "started")
    eventually(lambda: worker.logged(f"tasks={handle.id}"), "it is told that the process stands still")
    still = "SELECT id FROM orchestrator.workers WHERE still_since < now() AND CAST(:id AS uuid) = ANY(holds)"
    eventually(lambda: life.sql(still, id=handle.id), "people are shown so")
    worker.stop()
    assert worker.logged(": it was draining and blocked")
    eventually(lambda: handle.status() == "pending", "it is handed back")
    handle.cancel()
    eventually(lambda: handle.status() == "cancelled", "nobody else runs it")
    assert charges(life, handle) == (0, 0)


@pytest.mark.parametrize(
    ("policy", "tries"),
    [
        pytest.param(Retry(max=1, base=0.01, give_up_on=(TimeoutError,)), 1, marks=pytest.mark.long),
        (Retry(max=1, base=0.01, on=(ConnectionError,)), 1),
        (Retry(max=1, base=0.01, on=(TaskTimeout,)), 2),
    ],
    ids=["give up on it", "only on others", "only on it"],
)
def test_a_timeout_that_kills_the_process_obeys_the_retry_policy(
    life: Stack, tmp_path: Path, policy: Retry, tries: int
) -> None:
    worker = life.worker(*APP)
    handle = stubborn.keeps_the_interpreter.options(timeout=0.3, retries=policy).enqueue(str(tmp_path / "started"))
    with pytest.raises(TaskFailed, match=r"ran longer than its timeout of 0\.3 s"):
        handle.result(60)
    eventually(lambda: worker.logged(": a task must stop", tries), "it is told")
    assert (len(pids(tmp_path / "started", tries)), charges(life, handle)) == (tries, (tries, 0))


# -- cancel


def test_tasks_are_cancelled_while_workers_are_frozen_or_dead(life: Stack, tmp_path: Path) -> None:
    worker = life.worker(*APP, "--concurrency", "1")
    go = str(tmp_path / "go")
    running = stubborn.held.enqueue(str(tmp_path / "running"), go)
    pids(tmp_path / "running")
    dispatched = stubborn.held.enqueue(str(tmp_path / "dispatched"), go)
    later = stubborn.held.options(delay=3600).enqueue(str(tmp_path / "later"), go)
    worker.signal_group(signal.SIGSTOP)
    for handle in (running, dispatched, later):
        handle.cancel()
    for handle in (running, dispatched, later):
        with pytest.raises(TaskCancelled):
            handle.result(60)
    Path(go).touch()  # after SIGCONT the code returns at once: a late report of an ended attempt
    worker.signal_group(signal.SIGCONT)
    assert stubborn.pid.enqueue().result(60) > 0
    worker.kill()
    gone = stubborn.held.enqueue(str(tmp_path / "gone"), go)
    gone.cancel()
    with pytest.raises(TaskCancelled):
        gone.result(60)
    life.worker(*APP)
    assert stubborn.pid.enqueue().result(60) > 0
    assert [handle.status() for handle in (running, dispatched, later, gone)] == ["cancelled"] * 4
    assert not any((tmp_path / name).exists() for name in ("later", "gone"))
    assert len(pids(tmp_path / "running")) == 1


# -- replacement


def test_max_tasks_per_process_replaces_processes_without_losing_tasks(life: Stack) -> None:
    worker = life.worker(*APP, "--max-tasks-per-process", "20", "--concurrency", "4")
    handles = stubborn.app.enqueue_many(stubborn.nap, [(0.005,)] * 100)
    isolated = [stubborn.pid.options(isolation="process").enqueue() for _ in range(5)]
    served = Counter(handle.result(60) for handle in handles)
    assert max(served.values()) <= 20
    assert len({handle.result(60) for handle in isolated}) >= 1
    assert charges(life, *handles) == (0, 0)
    worn, spent, ready = (line_numbers(worker, words) for words in ("tasks of 20", "has run 20 tasks", "process.ready"))
    assert worn[0] < spent[0], "a successor is asked for before the last task"
    assert len(ready) >= 5
    eventually(lambda: "live" in states(life, worker), "one is at work")
    assert "dead" not in states(life, worker), "all that have ended did in good order"


def test_isolated_tasks_count_for_their_child_process_only(life: Stack) -> None:
    """Isolated tasks do not count for the worker process, whose replacement would also end its children."""
    worker = life.worker(*APP, "--max-tasks-per-process", "5", "--concurrency", "2")
    handles = [stubborn.pid.options(isolation="process").enqueue() for _ in range(20)]
    served = Counter(handle.result(60) for handle in handles)
    assert max(served.values()) == 5
    assert len(served) <= 5, "none but the last ones are ended before they have run all they may"
    assert len(line_numbers(worker, "process.ready")) == 1
    assert not worker.logged("tasks of 5")


@pytest.mark.parametrize("signals", [[signal.SIGHUP], [signal.SIGHUP, signal.SIGHUP]], ids=["once", "twice"])
def test_a_closed_terminal_drains_a_worker(life: Stack, tmp_path: Path, signals: list[signal.Signals]) -> None:
    worker = life.worker(*APP)
    tasks = [stubborn.held, stubborn.held.options(isolation="process")]
    handles = [task.enqueue(str(tmp_path / "started"), str(tmp_path / "go")) for task in tasks]
    pids(tmp_path / "started", 2)
    for number in signals:
        worker.signal_group(number)
    eventually(lambda: worker.logged("draining"), "it drains")
    (tmp_path / "go").touch()
    assert worker.wait(60) == 0
    assert all(handle.result(60) > 0 for handle in handles)
    assert len(pids(tmp_path / "started", 2)) == 2
    assert charges(life, *handles) == (0, 0)


def test_a_process_starts_no_tasks_while_its_parent_is_frozen(life: Stack) -> None:
    """Without the parent's heartbeats, other workers get the tasks that the process holds or claims."""
    worker = life.worker(*APP)
    mute = stubborn.pid.enqueue().result(60)
    os.kill(worker.pid, signal.SIGSTOP)
    stopped_at = time.monotonic()
    try:
        eventually(lambda: states(life, worker) == ["dead"], "it is taken for dead")
        eventually(lambda: time.monotonic() - stopped_at > SETTINGS["worker_ttl"], "it knows that itself")
        life.worker(*APP)
        served = {stubborn.pid.enqueue().result(60) for _ in range(20)}
        assert len(served) == 1
        assert mute not in served
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    eventually(lambda: stubborn.pid.enqueue().result(60) == mute, "it is heard, and works again")


def line_numbers(process: Process, words: str) -> list[int]:
    lines = process.log.read_text().splitlines()
    return [number for number, line in enumerate(lines) if words in line]


def test_a_process_that_grows_too_large_is_replaced(life: Stack) -> None:
    worker = life.worker(*APP, "--max-memory", "200MB")
    first = stubborn.pid.enqueue().result(60)
    assert stubborn.leaks.enqueue(1_000).result(60) == first
    assert stubborn.leaks.enqueue(250_000_000).result(60) == first
    eventually(lambda: worker.logged("reason='it uses"), "it is too large")
    eventually(lambda: not is_alive(first), "it has ended")
    assert stubborn.pid.enqueue().result(60) != first


def test_autoscale_follows_the_load(life: Stack, tmp_path: Path) -> None:
    worker = life.worker(*APP, "--autoscale", "1,3", "--concurrency", "2")
    go = tmp_path / "go"
    handles = stubborn.app.enqueue_many(stubborn.held, [(str(tmp_path / "started"), str(go))] * 8)
    assert len(set(pids(tmp_path / "started", 6))) == 3, "three processes, two tasks each"
    assert not worker.logged("process.ready", 4)
    go.touch()
    assert len({handle.result(60) for handle in handles}) == 3
    eventually(lambda: states(life, worker).count("live") == 1, "calm again, one is enough")
    assert "dead" not in states(life, worker)
    assert stubborn.pid.enqueue().result(60) > 0


# -- new code


def test_a_process_stays_if_its_successor_cannot_load_the_application(life: Stack, tmp_path: Path) -> None:
    lines = ["from orchestrator import Orchestrator", "app = Orchestrator()", "@app.task(name='stubborn.pid')", ""]
    module = tmp_path / "shop.py"
    module.write_text("\n".join([*lines, "def pid():", "    import os", "    return os.getpid()", ""]))
    worker = life.worker("--app", "shop:app", "--max-tasks-per-process", "2", folder=tmp_path)
    module.write_text("raise RuntimeError('half a deployment')")
    first = stubborn.pid.enqueue().result(60)
    assert stubborn.pid.enqueue().result(60) == first
    eventually(lambda: worker.logged("app.not_loaded: the worker continues"), "its successor fails")
    assert stubborn.pid.enqueue().result(60) == first
    assert states(life, worker) == ["live"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (None, "There is no module 'nosuch' to find the application in."),
        ("import logging.config\nlogging.config.dictConfig({'version': 1})\n1 / 0", "ZeroDivisionError: division"),
    ],
)
def test_an_application_that_cannot_be_loaded_is_reported_once(
    redis_url: str, tmp_path: Path, body: str | None, reason: str
) -> None:
    if body is not None:
        (tmp_path / "nosuch.py").write_text(body)
    words = ("worker", "--app", "nosuch:app", "--processes", "3", "--log-format", "json")
    done = forking.run(*words, environment=os.environ | {"ORCHESTRATOR_REDIS_URL": redis_url}, folder=tmp_path)
    assert done.returncode == 1
    records = [json.loads(line) for line in done.stderr.splitlines()]
    (error,) = [record for record in records if record["level"] == "ERROR"]
    assert reason in error["message"]
    assert "draining" not in done.stderr


def test_reload_replaces_processes_when_the_code_changes(life: Stack, tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    folder.mkdir()
    module = folder / "shop.py"

    def write(answer: str, *more: str) -> None:
        lines = ["from orchestrator import Orchestrator", "app = Orchestrator()", "@app.task", "def answer():"]
        whole = module.with_suffix(".new")  # no process may load half a file
        whole.write_text("\n".join([*lines, f"    return {answer}", *more, ""]))
        whole.rename(module)

    @stubborn.app.task(name="shop.answer")
    def answer() -> object: ...

    @stubborn.app.task(name="shop.added")
    def added() -> object: ...

    try:
        write("1")
        worker = life.worker("--app", "shop:app", "--reload", folder=folder, processes=2)
        assert answer.enqueue().result(60) == 1
        write("2", "@app.task", "def added():", "    return 'new'")
        eventually(lambda: worker.logged("app.changed files=shop.py"), "it has seen the change")
        eventually(lambda: worker.logged("process.ready", 4), "new processes")
        assert answer.enqueue().result(60) == 2
        assert added.enqueue().result(60) == "new", "the leader hears what the new code knows, while the old drains"
        write("(")
        eventually(lambda: worker.logged("waits for the next change"), "it waits")
        assert worker.log.read_text().count("SyntaxError") == 1, "one process tries, not all"
        waiting = answer.enqueue()
        write("3")
        assert waiting.result(60) == 3
        assert not worker.logged("worker.cut_off"), "it had nobody to be heard"
        assert worker.stop() == 0
    finally:
        del stubborn.app.tasks["shop.answer"], stubborn.app.tasks["shop.added"]


def test_a_workflow_that_holds_the_gil_does_not_harm_other_tasks(life: Stack, tmp_path: Path) -> None:
    worker = life.worker(*APP, "--concurrency", "2")
    neighbour = stubborn.held.enqueue(str(tmp_path / "neighbour"), str(tmp_path / "go"))
    old = pids(tmp_path / "neighbour")[0]
    handle = stubborn.keeps_all.start()
    pids(tmp_path / "neighbour", 2)
    eventually(lambda: worker.logged(f"process.killed pid={old}: the code of a workflow"), "it is told")
    (tmp_path / "go").touch()
    neighbour.result(60)
    assert charges(life, neighbour) == (0, 0)
    alone = "SELECT losses FROM orchestrator.tasks WHERE id = CAST(:id AS uuid) AND status = 'running' AND attempt > 1"
    eventually(lambda: life.sql(alone, id=handle.id), "it is tried in a process of its own, which may last")
    assert stubborn.pid.enqueue().result(60) != old
    handle.terminate()
    eventually(lambda: handle.status() == "terminated", "it has ended")
