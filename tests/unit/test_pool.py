"""A pool with code that does not end, and with tasks that wait for a slot or for the event loop."""

from __future__ import annotations

import os
import re
import threading
import time
from typing import Any

import pytest

from orchestrator import Orchestrator, TaskContext
from orchestrator.domain.tasks.task import Dispatch, Failed, Returned, Started, Succeeded
from orchestrator.sdk.values.payload import encode_call, encode_value
from orchestrator.workers.functions import Allowed
from orchestrator.workers.parent.held import HeldAttempts
from orchestrator.workers.running import pool as pool_module
from orchestrator.workers.running import standstill, threads
from orchestrator.workers.running.job import Bundle, Job, ReceivedJobs, Stage
from orchestrator.workers.running.pool import Pool
from orchestrator.workers.running.runner import Runner
from tests.waiting import eventually


class Reports(list[Any]):
    """A reporter and an outbox that keep their calls."""

    def __init__(self) -> None:
        self.later: list[bool] = []
        """For each report, whether its own thread was to send the report."""
        self.sent: list[int] = []
        """The number of reports at each call of `send`."""

    def report(self, report: Any, *_: object, later: bool = False, **__: object) -> None:
        if not isinstance(report, Started):
            self.later.append(later)
            self.append(report)

    def send(self) -> None:
        self.sent.append(len(self))

    def note(self, job: Job) -> None: ...

    def wake(self) -> None: ...

    def code_ended(self, job: Job) -> None:
        job.lingers = False


@pytest.mark.parametrize("completed", [False, True])
def test_a_task_that_does_not_end_fails_unless_it_had_completed(completed: bool) -> None:
    app = Orchestrator(database_url="postgresql://nowhere/x", redis_url="redis://nowhere")
    let_go: list[bool] = []

    @app.task(name="hangs", timeout=0.05)
    def hangs(ctx: TaskContext) -> None:
        while not let_go:
            try:
                time.sleep(0.001)
            except BaseException:  # noqa: BLE001
                continue

    reports, stuck, held = Reports(), list[Any](), HeldAttempts(capacity=4)
    runner = Runner(app, reports, Allowed(app, ()))  # type: ignore[arg-type]
    pool = Pool(runner, None, reports, held, concurrency=1, ttl=5.0, stop_grace=0.05, on_stuck=stuck.append)  # type: ignore[arg-type]
    pool.start()
    assert held.pulse()[0] > 0.0, "its parent sees a clock that stands even if the first task stops it"
    payload = encode_call("hangs", (), {}, 1_000)
    dispatch = Dispatch(b"a" * 16, 1, "hangs", payload, "default", '{"timeout": 0.05}')
    job = Job(dispatch, Bundle("", "", "", 1), held.add(dispatch.id, 1), time.monotonic())
    if completed:
        job.completion = encode_value(7, "it", 100)
    pool.submit([job])
    eventually(lambda: stuck == ["hangs"], "the pool is stuck")
    assert isinstance(reports[0], Succeeded if completed else Failed)
    assert getattr(reports[0], "lingering", False) is not completed
    if isinstance(reports[0], Failed):
        first, *_ = re.findall(r'File "([^"]*)", line \d+, in (\w+)', reports[0].error.traceback)
        assert first == (__file__, "hangs"), "where it stood when it was given up"
    assert pool.received.wait_until_idle(60), "nothing is left but what does not end"
    let_go.append(True)
    eventually(lambda: not job.lingers, "the job has ended")
    assert len(reports) == 1, "its late return is not reported"


def test_a_task_placed_on_this_worker_waits_for_a_slot_unless_recalled() -> None:
    """A task that any worker may run is returned after a moment; a task that few workers know would only come back."""
    app = Orchestrator(database_url="postgresql://nowhere/x", redis_url="redis://nowhere")
    let_go = threading.Event()

    @app.task(name="waits")
    def waits() -> None:
        let_go.wait(60.0)

    reports, held = Reports(), HeldAttempts(capacity=8)
    runner = Runner(app, reports, Allowed(app, ()))  # type: ignore[arg-type]
    pool = Pool(runner, None, reports, held, concurrency=1, ttl=1e9, stop_grace=1.0, on_stuck=print)  # type: ignore[arg-type]
    pool.start()

    def job(letter: bytes, queue: str) -> Job:
        dispatch = Dispatch(letter * 16, 1, "waits", encode_call("waits", (), {}, 1_000), "default")
        return Job(dispatch, Bundle("", queue, "", 1), held.add(dispatch.id, 1), time.monotonic())

    first, spared, placed, common = job(b"a", "default"), job(b"b", "@me"), job(b"c", "@me"), job(b"d", "default")
    pool.submit([first])
    eventually(lambda: first.stage is Stage.RUNNING, "the only slot is taken")
    pool.submit([spared, placed, common])
    eventually(lambda: reports, "somebody has given up waiting")
    assert reports == [Returned(b"d" * 16, 1, "no free slot")]
    pool.spare([(b"a" * 16, 1), (b"b" * 16, 1), (b"c" * 16, 2)])
    assert reports[1:] == [Returned(b"b" * 16, 1, "other workers have free slots")], "what runs is not disturbed"
    let_go.set()
    eventually(lambda: len(reports) == 4, "the others have run")
    assert reports.later == [False, False, False, True], "the thread of the only job here sends its report"
    assert [type(report) for report in reports[2:]] == [Succeeded, Succeeded]
    assert {report.id for report in reports[2:]} == {b"a" * 16, b"c" * 16}


def test_reports_of_short_tasks_are_sent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Orchestrator(database_url="postgresql://nowhere/x", redis_url="redis://nowhere")

    @app.task(name="short")
    def short() -> None: ...

    reports, held = Reports(), HeldAttempts(capacity=200)
    runner = Runner(app, reports, Allowed(app, ()))  # type: ignore[arg-type]
    pool = Pool(runner, None, reports, held, concurrency=1, ttl=1e9, stop_grace=1.0, on_stuck=print)  # type: ignore[arg-type]
    monkeypatch.setattr(pool_module, "_MAX_BATCH_DELAY", 1e9)
    monkeypatch.setattr(threads, "_QUICK_SECONDS", 1e9)
    pool._sent_at = time.monotonic()

    def run(number: int) -> None:
        tasks = [Dispatch(os.urandom(16), 1, "short", encode_call("short", (), {}, 1_000), "") for _ in range(number)]
        pool.submit([Job(task, Bundle("", "", "", 1), held.add(task.id, 1), time.monotonic()) for task in tasks])

    run(1)
    eventually(lambda: reports.sent == [1], "it is known to be short from now on")
    run(100)
    eventually(lambda: reports.sent[-1] == 101, "all are sent")
    assert reports.later == [True] * 101
    monkeypatch.setattr(pool_module, "_MAX_BATCH_DELAY", 0.0)
    run(3)
    eventually(lambda: reports.sent[-3:] == [102, 103, 104], "none waits for long")


def test_tasks_behind_a_blocked_event_loop_are_returned_and_threads_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "_MAX_DELAY", 1e9)
    app = Orchestrator(database_url="postgresql://nowhere/x", redis_url="redis://nowhere")
    blocked, let_go = threading.Event(), threading.Event()

    @app.task(name="blocks")
    async def blocks() -> None:
        blocked.set()
        let_go.wait(60.0)

    for name in ("soon", "late"):

        @app.task(name=name)
        async def soon() -> None: ...

    @app.task(name="thread")
    def thread() -> None: ...

    reports, held = Reports(), HeldAttempts(capacity=100)
    runner = Runner(app, reports, Allowed(app, ()))  # type: ignore[arg-type]
    quiet: dict[str, Any] = {"on_stuck": print, "blocked_for": 1e9}
    pool = Pool(runner, None, reports, held, concurrency=4, ttl=1e9, stop_grace=1.0, **quiet)  # type: ignore[arg-type]
    pool.start()

    def job(name: str, received_at: float = 1e12, attempt: int = 1) -> Job:
        dispatch = Dispatch(name.encode().ljust(16), attempt, name, encode_call(name, (), {}, 1_000), "default")
        return Job(dispatch, Bundle("", "default", "", 1), held.add(dispatch.id, 1), received_at)

    blocker = job("blocks")
    pool.submit([blocker])
    assert blocked.wait(60.0)
    why = "the event loop is blocked"
    pool.submit([job("soon", time.monotonic()), job("late", time.monotonic())])
    eventually(lambda: len(reports) == 2, "they are handed back")
    assert reports == [Returned(name.ljust(16), 1, why) for name in (b"soon", b"late")]
    reports.clear()
    assert pool.standstill.hands_back
    stays = job("soon", time.monotonic(), attempt=2)
    pool.submit([stays, job("late", time.monotonic(), attempt=2)])
    eventually(lambda: reports, "one comes back, and stays away for longer")
    assert reports.pop() == Returned(b"late".ljust(16), 2, why, 0.2)
    assert stays.stage is Stage.WAITING, "the loop begins with the other when it turns"
    pool.submit([job("thread")])
    eventually(lambda: reports, "what needs no event loop has run")
    assert isinstance(reports.pop(), Succeeded)
    let_go.set()
    eventually(lambda: reports, "the event loop turns")
    assert reports[0].id == blocker.dispatch.id
    eventually(lambda: len(reports) == 2, "so has what stayed, or it is handed back after all")
    reports.clear()
    eventually(lambda: not pool.standstill.hands_back, "that was noticed")
    pool.submit([job("soon", attempt=3)])
    eventually(lambda: reports, "it runs here")
    assert isinstance(reports.pop(), Succeeded)


def test_a_full_process_wakes_when_a_read_is_worthwhile() -> None:
    received = ReceivedJobs(2, HeldAttempts(capacity=1_000))
    received.pace.rate = 5_000.0  # 100 jobs are received ahead of free slots
    payload = encode_call("short", (), {}, 1_000)
    jobs = [Job(Dispatch(os.urandom(16), 1, "short", payload, ""), Bundle("", "", "", 1), 0, 0.0) for _ in range(102)]
    received.jobs.update({id(job): job for job in jobs})
    assert received.wait_for_room(0.0) == 0
    woken = []
    for job in jobs:
        received.remove(job)
        woken.append(received.freed.is_set())
    assert woken.index(True) == 70
    received.jobs[id(jobs[0])] = jobs[0]
    received.pace.rate = 0.0
    received.freed.clear()
    received.remove(jobs[0])
    assert received.freed.is_set(), "where nothing is received ahead, for each free slot"
