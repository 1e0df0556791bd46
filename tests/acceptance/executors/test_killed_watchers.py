"""The watcher of an execution may be killed at any moment: the work starts once, and its outcome is reported."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import project
import pytest

from tests.acceptance.conftest import fresh_stack
from tests.acceptance.executors.bureaus import BureauHarness
from tests.acceptance.executors.harness import Stage
from tests.waiting import eventually

_IMPATIENT = {"worker_ttl": 2.0, "heartbeat": 0.5, "lease": 2.0}


@pytest.fixture(scope="module")
def bureau(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BureauHarness]:
    """A remote service that can kill or delay its caller."""
    harness = BureauHarness(tmp_path_factory.mktemp("bureau"))
    yield harness
    harness.close()


@pytest.fixture(scope="module")
def scene(
    bureau: BureauHarness, database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    """A scheduler, shared by the tests of this module."""
    folder: Path = tmp_path_factory.mktemp("stack")
    with fresh_stack(database_url, redis_url, folder, **_IMPATIENT) as stack:
        bureau.prepare(stack)
        stage = Stage(stack, bureau)
        yield stage
        stage.close()


@pytest.mark.long_for("before submit", "watch")
@pytest.mark.parametrize("moment", ["before submit", "submit", "watch", "end"])
def test_work_starts_once_when_its_watcher_is_killed(scene: Stage, bureau: BureauHarness, moment: str) -> None:
    first = scene.worker()
    bureau.crash[moment] = first.kill
    work, id = scene.enqueue("return", value=moment)
    first.wait(60)
    scene.worker()
    try:
        assert work.result(60) == moment
        assert bureau.started(id) == 1
        assert scene.failures(work) == 0
    finally:
        scene.leave()


def test_work_starts_once_when_its_external_id_was_not_recorded(scene: Stage, bureau: BureauHarness) -> None:
    first, leader = scene.worker(), scene.stack.leader()

    def stop() -> None:
        leader.signal_group(signal.SIGSTOP)  # the watcher's further reports are not applied

    bureau.crash |= {"submit": stop, "after submit": first.kill}
    work, id = scene.enqueue("return", value="kept by nobody")
    try:
        first.wait(60)
        leader.signal_group(signal.SIGCONT)
        scene.worker()
        assert work.result(60) == "kept by nobody"
        assert bureau.started(id) == 1
        assert scene.failures(work) == 0
    finally:
        leader.signal_group(signal.SIGCONT)
        scene.leave()


@pytest.mark.long
def test_unreleased_work_expires_when_its_watcher_is_killed(scene: Stage, bureau: BureauHarness) -> None:
    first = scene.worker()
    bureau.crash["before release"] = first.kill
    work, id = scene.enqueue("return", value=1)
    try:
        assert work.result(60) == 1
        first.wait(60)
        scene.worker()
        other, _ = scene.enqueue("return", value=2)
        assert other.result(60) == 2
        assert (work.status(), bureau.started(id), scene.failures(work)) == ("success", 1, 0)
        assert [name for name in bureau.expired if work.id in name], "nobody will clear it away, so it goes by itself"
    finally:
        scene.leave()


@pytest.mark.long
def test_a_watcher_that_lost_its_attempt_does_not_release_the_work(scene: Stage, bureau: BureauHarness) -> None:
    first, is_read, go_on = scene.worker(), threading.Event(), threading.Event()

    def stop_first() -> None:
        first.signal_group(signal.SIGSTOP)
        is_read.set()

    def wait() -> None:
        is_read.set()
        go_on.wait(60)

    bureau.crash["end"] = stop_first
    work, _ = scene.enqueue("return", value=1)
    try:
        assert is_read.wait(60)
        is_read.clear()
        bureau.crash["watch"] = wait
        scene.worker()
        assert is_read.wait(60), "another watches it"
        before = len(bureau.released)
        first.signal_group(signal.SIGCONT)
        resumed = time.monotonic()
        eventually(lambda: time.monotonic() - resumed > 6, "the first has told how it ended, and nobody believes it")
        assert len(bureau.released) == before
        go_on.set()
        assert (work.result(60), scene.failures(work)) == (1, 0)
    finally:
        go_on.set()
        first.signal_group(signal.SIGCONT)
        scene.leave()


def test_work_that_starts_slowly_stays_dispatched_and_starts_once(scene: Stage, bureau: BureauHarness) -> None:
    scene.worker()
    begun = threading.Event()
    bureau.crash["submit"] = lambda: begun.wait(60)
    work, id = scene.enqueue("return", value="late")
    try:
        scene.is_begun(id)
        beats = scene.stack.settings.worker_ttl * 1.5
        asked = time.monotonic()
        eventually(lambda: time.monotonic() - asked > beats, "whoever is thought dead by then would be")
        assert work.status() == "dispatched", "it is nobody's, and has not started"
        begun.set()
        assert work.result(60) == "late"
        assert (bureau.started(id), scene.failures(work)) == (1, 0)
    finally:
        begun.set()
        scene.leave()


@pytest.mark.long
def test_a_full_worker_receives_executions_after_redis_loses_its_data(
    scene: Stage, bureau: BureauHarness, tmp_path: Path
) -> None:
    """The executions have their own queue: in one queue, the leader would line them up with the tasks."""
    scene.worker("--app", "project:app", "--concurrency", "1", "--queues", "default,outside")
    try:
        full = project.held.enqueue(str(tmp_path / "started"), str(tmp_path / "go"))
        eventually(lambda: full.status() == "running", "the only slot is taken")
        for number in (1, 2):  # before and after the worker has a thread that receives only executions
            scene.stack.redis.flushall()
            work, id = scene.enqueue("return", {"queue": "outside"}, value=number)
            assert work.result(60) == number
            assert bureau.started(id) == 1
        assert full.status() == "running"
    finally:
        (tmp_path / "go").touch()
        scene.leave()
