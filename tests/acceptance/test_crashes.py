"""Tasks that end, fork or stop the process that runs them: only these tasks are charged, and the queue goes on."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import crashing
import psutil
import pytest

from orchestrator import Handle, TaskFailed, gather
from tests import forking
from tests.acceptance.stack import HERE, Stack
from tests.waiting import eventually

APP = ("--app", "crashing:app")
application = crashing.app
SETTINGS = {"worker_ttl": 4.0, "heartbeat": 0.5, "stop_grace": 30.0, "drain_timeout": 3.0, "loss_limit": 2}
"""The grace period is long: on a slow machine, code that obeys a stop must not count as stuck."""


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def starts(path: Path, count: int) -> list[int]:
    """Wait until tasks have started `count` times; return the process ids."""
    eventually(lambda: len(lines(path)) >= count, f"{count} starts in {path.name}", 60)
    return [int(line) for line in lines(path)]


def charges(stack: Stack, *handles: Handle[Any]) -> tuple[int, int]:
    """Return how many failures and losses were charged to these tasks."""
    statement = "SELECT sum(failures), sum(losses) FROM orchestrator.ended_tasks WHERE id = ANY(CAST(:ids AS uuid[]))"
    failures, losses = stack.sql(statement, ids=[handle.id for handle in handles])[0]
    return failures, losses


def descendants(pid: int) -> set[int]:
    return {process.pid for process in psutil.Process(pid).children(recursive=True)}


# -- which task is charged with a death


@pytest.mark.long
def test_tasks_in_child_processes_are_not_charged_for_their_workers_death(life: Stack, tmp_path: Path) -> None:
    worker = life.worker(*APP, "--concurrency", "20")
    started, kills = tmp_path / "started", tmp_path / "kills"
    innocents = crashing.app.enqueue_many(crashing.held, [(str(started), str(tmp_path / "go"))] * 12)
    killers = []
    for deaths in (1, 2):  # the second kills the process whose children run the innocents
        starts(started, 12 * deaths)
        killers.append(crashing.crashes_where_others_are.enqueue(str(kills), str(started), 12 * deaths))
        starts(started, 12 * (deaths + 1))
    life.worker(*APP, "--concurrency", "20")
    worker.kill()  # as if its machine had died
    starts(started, 12 * 4)
    (tmp_path / "go").touch()
    assert len(set(gather(innocents, timeout=60))) == 12, "each in a process of its own"
    assert charges(life, *innocents) == (0, 0)
    for killer in killers:
        with pytest.raises(TaskFailed) as caught:
            killer.result(60)
        assert caught.value.kind == "WorkerLost"
    assert charges(life, *killers) == (0, 2 * SETTINGS["loss_limit"])


@pytest.mark.long_for("1", "2", "3", "5", "255")
@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 255])
def test_an_exiting_task_counts_as_lost_with_any_exit_code(life: Stack, tmp_path: Path, code: int) -> None:
    worker = life.worker(*APP)
    started, kills = tmp_path / "started", tmp_path / "kills"
    neighbours = [crashing.held.enqueue(str(started), str(tmp_path / "go")) for _ in range(2)]
    starts(started, 2)
    culprit = crashing.exits.enqueue(str(kills), code)
    died = rf"The process that ran this attempt died: exit code {code} in process \d+ on .+, which used up to \d+ MB"
    with pytest.raises(TaskFailed, match=died) as caught:
        culprit.result(60)
    assert caught.value.kind == "WorkerLost"
    eventually(lambda: any("died: exit code" in line.text for line in culprit.logs()), "its log says so")
    assert len(lines(kills)) == 1 + SETTINGS["loss_limit"], "once beside others, then alone"
    assert crashing.pid.enqueue().result(60) > 0, "somebody works"
    (tmp_path / "go").touch()
    gather(neighbours, timeout=60)
    assert (charges(life, culprit), charges(life, *neighbours)) == ((0, SETTINGS["loss_limit"]), (0, 0))
    eventually(lambda: worker.logged(f"reason='exit code {code}'"), "it is told")
    assert worker.is_running()


def test_a_process_replaced_by_another_program_is_killed(life: Stack, tmp_path: Path) -> None:
    worker = life.worker(*APP)
    handle = crashing.becomes_another_program.enqueue(str(tmp_path / "pids"))
    first = starts(tmp_path / "pids", 1)[0]
    assert crashing.pid.enqueue().result(60) != first
    eventually(lambda: first not in descendants(worker.pid), "it is killed")
    with pytest.raises(TaskFailed) as caught:
        handle.result(60)
    assert caught.value.kind == "WorkerLost"


# -- time


def test_a_timed_out_attempt_fails_whatever_its_code_returns(life: Stack) -> None:
    worker = life.worker(*APP)
    handles = [crashing.returns_all_the_same.enqueue(how) for how in ("returns", "raises")]
    handles.append(crashing.returns_all_the_same_async.enqueue())
    for handle in handles:
        with pytest.raises(TaskFailed, match=r"ran longer than its timeout of 0\.3 s") as caught:
            handle.result(60)
        assert caught.value.kind == "orchestrator.errors.TaskTimeout"
    with pytest.raises(TaskFailed, match="ValueError: something else"):
        handles[1].result(0)
    assert not worker.logged("process.replaced")


def test_a_timeout_begins_with_the_code_of_the_task(life: Stack, tmp_path: Path) -> None:
    """The slow import of a new process does not count, neither for an isolated task nor after a loss."""
    module = tmp_path / "slow.py"
    module.write_text(
        "\n".join(
            [
                "import os, sys, time",
                "from orchestrator import Orchestrator",
                "time.sleep(2 if 'workers.running.isolated' in ' '.join(sys.orig_argv) else 0)",
                "app = Orchestrator()",
                "@app.task(name='crashing.pid')",
                "def pid():",
                "    return os.getpid()",
                "@app.task(name='crashing.exits')",
                "def exits(path, code):",
                "    if os.path.exists(path):",
                "        return",
                "    open(path, 'w').close()",
                "    os._exit(code)",
                "",
            ]
        )
    )
    life.worker("--app", "slow:app", folder=tmp_path)
    isolated = crashing.pid.options(isolation="process", timeout=1.0).enqueue()
    assert isolated.result(60) > 0
    again = crashing.exits.options(timeout=1.0).enqueue(str(tmp_path / "once"), 9)
    again.result(60)
    assert charges(life, isolated, again) == (0, 0)


def test_a_task_whose_process_cannot_start_is_returned(life: Stack, tmp_path: Path) -> None:
    module = tmp_path / "broken.py"
    lines_of_it = [
        "import os, pathlib, sys",
        "if 'workers.running.isolated' in ' '.join(sys.orig_argv) and not pathlib.Path('mended').exists():",
        "    sys.exit('half a deployment')",
        "from orchestrator import Orchestrator",
        "app = Orchestrator()",
        "@app.task(name='crashing.pid')",
        "def pid():",
        "    return os.getpid()",
        "",
    ]
    module.write_text("\n".join(lines_of_it))
    worker = life.worker("--app", "broken:app", folder=tmp_path)
    handle = crashing.pid.options(isolation="process").enqueue()
    eventually(lambda: worker.logged("task.process_not_started"), "it says so")
    (tmp_path / "mended").touch()
    assert handle.result(60) > 0
    assert charges(life, handle) == (0, 0)


# -- forks


def test_a_forked_child_ends_with_the_code_of_its_task(life: Stack, tmp_path: Path) -> None:
    worker = life.worker(*APP, "--concurrency", "4")
    started, forked = tmp_path / "started", tmp_path / "forked"
    neighbours = crashing.app.enqueue_many(crashing.held, [(str(started), str(tmp_path / "go"))] * 2)
    starts(started, 2)
    before = descendants(worker.pid)
    expected = {"returns": 0, "exits": 7, "raises": 1}
    for how, code in expected.items():
        assert crashing.forks.enqueue(str(forked), how).result(60) == code
        assert crashing.forks.options(isolation="process").enqueue(str(forked), how).result(60) == code
    for how, code in {"returns": 0, "exits": 7, "awaits": 1}.items():
        assert crashing.forks_async.enqueue(str(forked), how).result(60) == code
    assert crashing.forks_in_a_thread.enqueue(str(forked)).result(60) == 0
    assert crashing.forks_and_enqueues.enqueue(str(tmp_path / "refused")).result(60) == 0
    assert lines(tmp_path / "refused") == ["WrongState"]
    for isolation in ("thread", "process"):
        assert crashing.terminates_a_fork.options(isolation=isolation).enqueue().result(60) == -signal.SIGTERM
    assert len(starts(forked, 10)) == 10
    assert not descendants(worker.pid) & set(starts(forked, 10)), "no copy is left"
    many = crashing.app.enqueue_many(crashing.pid, [()] * 200)
    assert set(gather(many, timeout=60)) <= before, "the process works on"
    (tmp_path / "go").touch()
    gather(neighbours, timeout=60)
    assert len(starts(started, 2)) == 2, "nothing ran twice"


# -- the event loop


def test_an_event_loop_stopped_or_emptied_by_a_task_goes_on(life: Stack, tmp_path: Path) -> None:
    worker = life.worker(*APP)
    neighbours = [crashing.held_async.enqueue(str(tmp_path / "started"), str(tmp_path / "go")) for _ in range(3)]
    process = starts(tmp_path / "started", 3)[0]
    for spoiler in (crashing.stops_the_loop, crashing.cancels_everything, crashing.leaves_a_bomb):
        assert spoiler.enqueue().result(60) == process
        assert crashing.pid_async.enqueue().result(60) == process
    (tmp_path / "go").touch()
    assert gather(neighbours, timeout=60) == [process] * 3
    assert charges(life, *neighbours) == (0, 0)
    eventually(lambda: worker.logged("process.event_loop_stopped by='task crashing.stops_the_loop"), "it is told")
    assert crashing.stops_the_loop.options(isolation="process").enqueue().result(60) != process
    for words in ("cancels_everything target=crashing.held_async", "process.event_loop_interrupted error=SystemExit"):
        eventually(partial(worker.logged, words), f"it is told: {words}")


def test_tasks_for_a_blocked_event_loop_are_redispatched_slowly(life: Stack, tmp_path: Path) -> None:
    """The leader redispatches about once a second. Tasks that need no event loop go on in the same process."""
    life.worker(*APP, "--concurrency", "4")
    blocker = crashing.blocks.enqueue(str(tmp_path / "blocks"), str(tmp_path / "end"))
    starts(tmp_path / "blocks", 1)
    began = time.monotonic()
    waiting = [crashing.pid_async.enqueue() for _ in range(3)]
    while time.monotonic() < began + 1.5:
        assert crashing.pid.enqueue().result(60) > 0
    statement = """SELECT max(attempt) FROM (SELECT id, attempt FROM orchestrator.tasks UNION ALL
                   SELECT id, attempt FROM orchestrator.ended_tasks) AS task WHERE id = ANY(CAST(:ids AS uuid[]))"""
    handed_out = life.scalar(statement, ids=[handle.id for handle in waiting])
    assert handed_out <= 4 + (time.monotonic() - began)
    (tmp_path / "end").touch()
    gather([blocker, *waiting], timeout=60)
    assert charges(life, blocker, *waiting) == (0, 0)


def test_a_process_whose_event_loop_is_blocked_or_closed_is_replaced(life: Stack, tmp_path: Path) -> None:
    worker = life.worker(*APP)
    victims = [crashing.held_async.enqueue(str(tmp_path / "started"), str(tmp_path / "go"))]
    first = starts(tmp_path / "started", 1)[0]
    blocker = crashing.blocks.enqueue(str(tmp_path / "blocks"), str(tmp_path / "end"))
    assert starts(tmp_path / "blocks", 1) == [first]
    assert crashing.pid_async.enqueue().result(60) != first, "what comes later runs elsewhere"
    for words in ("task crashing.blocks[", "] has kept the event loop from running for 5 s, in wait_for"):
        eventually(partial(worker.logged, words), f"it is told: {words}")
    second = starts(tmp_path / "started", 2)[1]
    assert second != first
    alone = starts(tmp_path / "blocks", 2)[1]
    assert alone not in (first, second), "where it blocks nobody else"
    closer = crashing.closes_the_loop.enqueue(str(tmp_path / "closes"))
    assert starts(tmp_path / "closes", 1) == [second]
    third = starts(tmp_path / "started", 3)[2]
    assert third != second
    eventually(lambda: worker.logged("the event loop of this process was closed by a task"), "it is told")
    (tmp_path / "go").touch()
    (tmp_path / "end").touch()
    gather([*victims, blocker], timeout=60)
    assert charges(life, blocker, *victims) == (0, 0)
    with pytest.raises(TaskFailed) as caught:
        closer.result(60)
    kinds = ("RuntimeError", "AttributeError")  # AttributeError from Python 3.13 on
    assert caught.value.kind in kinds, "where it is alone with the loop, that is its own failure"


# -- a blocked output pipe


def test_a_worker_with_a_blocked_output_pipe_works_and_drains(life: Stack, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"full\n" * 1_000)
    os.set_blocking(writer, True)
    words = ("worker", *APP, "--processes", "1")
    worker = forking.begin(*words, environment=life.environment, folder=HERE, stdout=writer, stderr=writer)
    os.close(writer)
    try:
        handle = crashing.held.enqueue(str(tmp_path / "started"), str(tmp_path / "go"))
        first = starts(tmp_path / "started", 1)
        assert crashing.chatters.enqueue(2_000).result(60) == first[0]
        assert crashing.stops_the_loop.enqueue().result(60) == first[0]
        os.kill(first[0], signal.SIGKILL)
        assert crashing.pid.enqueue().result(60) != first[0], "its parent tells of the death, and goes on"
        starts(tmp_path / "started", 2)
        until = time.monotonic() + SETTINGS["worker_ttl"] + SETTINGS["heartbeat"]
        eventually(lambda: time.monotonic() > until, "it would count as dead by now")
        assert len(starts(tmp_path / "started", 2)) == 2, "it does not"
        worker.send_signal(signal.SIGTERM)
        (tmp_path / "go").touch()
        assert handle.result(60) > 0
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.wait()
        os.close(reader)
