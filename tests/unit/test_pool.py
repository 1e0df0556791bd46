"""What a pool does about code that does not end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from orchestrator import Orchestrator, TaskContext
from orchestrator.domain.tasks.task import Dispatch, Failed, Started, Succeeded
from orchestrator.sdk.values.payload import encode_call, encode_value
from orchestrator.workers.functions.allowed import Allowed
from orchestrator.workers.parent.held import HeldAttempts
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.pool import Pool
from orchestrator.workers.running.runner import Runner
from tests.waiting import eventually


class Reports(list[Any]):
    """A reporter and an outbox that keep what they are given."""

    def report(self, report: Any, _: Job | None = None) -> None:
        if not isinstance(report, Started):
            self.append(report)

    def note(self, job: Job) -> None: ...

    def code_ended(self, job: Job) -> None:
        job.lingers = False


@pytest.mark.parametrize("completed", [False, True])
def test_a_task_that_does_not_end_has_failed_unless_it_had_completed(completed: bool) -> None:
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
    assert pool.wait_until_idle(0.1), "nothing is left but what does not end"
    let_go.append(True)
    eventually(lambda: not job.lingers, "the job has ended")
    assert len(reports) == 1, "its late return is not reported"
