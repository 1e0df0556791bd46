"""The conformance suite of executors: pytest tests to run against your own executor.

    class TestHotFolder(ExecutorConformance):
        harness_type = HotFolderHarness

The suite starts a scheduler and workers as processes. They use Postgres and Redis of their own (extra `embedded`) or,
in a separate namespace, the servers in the settings. A harness starts the remote side: a real one, or a local server
that speaks its protocol.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import ClassVar

import pytest

from orchestrator.errors import TaskCancelled, TaskFailed
from orchestrator.testing.executor_stage import (
    AWAY,
    SETTINGS,
    ExecutorHarness,
    Program,
    Services,
    Stage,
    eventually,
    local_services,
)

__all__ = ["AWAY", "ExecutorConformance", "ExecutorHarness", "Program", "Services", "Stage", "eventually"]


class ExecutorConformance:
    """The tests. Subclass with a name that begins with `Test`, and set `harness_type`."""

    harness_type: ClassVar[type[ExecutorHarness]]

    @pytest.fixture(scope="class")
    @classmethod
    def shared_stage(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
        """A remote side and a scheduler, shared by all tests."""
        remaining = {name for name in vars(ExecutorConformance) if name.startswith("test_")} - set(
            cls.harness_type.without
        )
        assert remaining, f"{cls.harness_type.__name__}.without names all tests, so no test would run."
        harness = cls.harness_type(tmp_path_factory.mktemp("harness"))
        try:
            with local_services(tmp_path_factory.mktemp("services"), **SETTINGS, **harness.settings()) as services:
                harness.prepare(services)
                stage = Stage(services, harness)
                yield stage
                stage.close()
        finally:
            harness.close()

    @pytest.fixture
    def stage(self, request: pytest.FixtureRequest, shared_stage: Stage) -> Iterator[Stage]:
        """The shared stage for one test. Workers that the test starts are stopped after it."""
        if request.function.__name__ in shared_stage.harness.without:
            pytest.skip(f"the harness of {shared_stage.harness.name} leaves it out")
        yield shared_stage
        shared_stage.leave()

    def test_work_succeeds_or_fails(self, stage: Stage) -> None:
        stage.usual()
        value = {"text": "grüße", "numbers": [1, 2.5, None]}
        good, first = stage.enqueue("return", value=value)
        bad, second = stage.enqueue("fail", message="no such thing")
        assert good.result(60) == value
        with pytest.raises(TaskFailed, match="no such thing"):
            bad.result(60)
        assert (stage.harness.started(first), stage.harness.started(second)) == (1, 1)

    def test_what_fails_is_tried_again_from_the_start(self, stage: Stage) -> None:
        stage.usual()
        bad, id = stage.enqueue("fail", {"retries": [0.1, 0.1]}, message="not this time")
        with pytest.raises(TaskFailed, match="not this time"):
            bad.result(60)
        assert stage.harness.started(id) == 3

    def test_work_that_takes_too_long_is_ended(self, stage: Stage) -> None:
        stage.usual()
        soon = stage.harness.soon
        for limit in (soon, 4 * soon, 16 * soon):  # on a busy machine, the first limit may pass before the work begins
            slow, id = stage.enqueue("hold", {"timeout": limit})
            with pytest.raises(TaskFailed, match=f"ran longer than its timeout of {limit:g} s"):
                slow.result(90)
            eventually(lambda: not stage.harness.is_running(id), "the remote side has ended the work")  # noqa: B023
            if stage.harness.started(id):
                break
        assert stage.harness.started(id) == 1

    def test_cancelled_work_is_ended(self, stage: Stage) -> None:
        stage.usual()
        held, id = stage.hold()
        held.cancel()
        with pytest.raises(TaskCancelled):
            held.result(60)
        eventually(lambda: not stage.harness.is_running(id), "the remote side has ended the work")

    def test_a_large_result_arrives_and_one_that_is_too_large_fails_with_a_reason(self, stage: Stage) -> None:
        stage.usual()
        large, _ = stage.enqueue("large", bytes=200_000)
        assert large.result(60) == "x" * 200_000
        too_large, _ = stage.enqueue("large", bytes=stage.services.settings.max_payload + 1)
        with pytest.raises(TaskFailed, match="bytes, and at most"):
            too_large.result(60)

    def test_what_the_work_says_is_in_the_log_of_its_task(self, stage: Stage) -> None:
        stage.usual()
        talking, _ = stage.enqueue("say", lines=20)
        assert talking.result(60) == 20

        def said() -> list[str]:
            return [entry.text for entry in talking.logs()]

        eventually(lambda: "line 19" in said(), "the last line is there")
        assert [line for line in said() if line.startswith("line")] == [f"line {number}" for number in range(20)]

    def test_garbage_is_a_failure_and_stops_nobody(self, stage: Stage) -> None:
        stage.usual()
        garbage, _ = stage.enqueue("garbage")
        good, _ = stage.enqueue("return", value=1)
        with pytest.raises(TaskFailed):
            garbage.result(60)
        assert good.result(60) == 1

    def test_work_that_is_gone_is_a_failure_that_is_tried_again(self, stage: Stage) -> None:
        stage.usual()
        held, id = stage.hold(retries=[0.1])
        stage.harness.lose(id)
        eventually(lambda: stage.harness.started(id) == 2, "the work is started again")
        stage.harness.let_go(id, "second")
        assert held.result(60) == "second"

    def test_a_remote_side_that_is_away_is_waited_for(self, stage: Stage) -> None:
        worker = stage.usual()
        held, id = stage.hold()
        stage.harness.go_down()
        waiting, other = stage.enqueue("return", value=2)
        eventually(lambda: worker.logged("executor.unavailable"), "the outage is logged")
        stage.harness.come_back()
        stage.harness.let_go(id, 1)
        assert held.result(60) == 1
        assert waiting.result(60) == 2
        assert (stage.harness.started(id), stage.harness.started(other)) == (1, 1)

    def test_a_remote_side_that_is_away_for_minutes_is_asked_again_until_it_is_back(self, stage: Stage) -> None:
        """Timeouts are shortened by settings, so that an outage of minutes takes seconds."""
        worker, settings = stage.worker(), stage.services.settings
        held, id = stage.hold()
        stage.harness.hang()
        waiting, other = stage.enqueue("return", value=2)
        _pass(2 * settings.executor_timeout)  # requests get no answer
        stage.harness.go_down()
        eventually(lambda: worker.logged("executor.unavailable"), "the outage is logged")
        stage.harness.let_go(id, 1)  # the work ends while nobody can see it
        _pass(4 * settings.executor_pause)
        assert held.status() == "running"
        assert waiting.status() in ("dispatched", "running")
        stage.harness.come_back()
        assert held.result(60) == 1
        assert waiting.result(60) == 2
        assert (stage.harness.started(id), stage.harness.started(other)) == (1, 1)
        assert (stage.failures(held), stage.failures(waiting)) == (0, 0)

    def test_time_runs_while_the_remote_side_is_away(self, stage: Stage) -> None:
        stage.worker()
        began = time.monotonic()
        held, id = stage.hold(timeout=30.0)
        stage.harness.go_down()
        eventually(lambda: time.monotonic() - began > 30.0, "its timeout has passed")
        assert stage.harness.is_running(id), "it still runs, because the executor was down"
        stage.harness.come_back()
        with pytest.raises(TaskFailed, match="ran longer than its timeout of 30 s"):
            held.result(60)
        eventually(lambda: not stage.harness.is_running(id), "the remote side has ended the work")
        assert stage.harness.started(id) == 1

    def test_many_at_once_need_no_slots(self, stage: Stage) -> None:
        stage.worker("--concurrency", "1")
        held = stage.hold_many(12)
        assert stage.add.enqueue(1, 2).result(60) == 3, "plain tasks continue beside them"
        for place, (handle, id) in enumerate(held):
            stage.harness.let_go(id, place)
            assert handle.result(60) == place

    def test_a_worker_that_stops_leaves_the_work_alone_and_another_goes_on(self, stage: Stage) -> None:
        first = stage.worker()
        held, id = stage.hold()
        assert first.stop() == 0
        assert stage.harness.is_running(id)
        stage.worker()
        stage.is_watched(held)
        stage.harness.let_go(id, "done")
        assert held.result(60) == "done"
        assert stage.harness.started(id) == 1
        assert stage.failures(held) == 0

    def test_a_watcher_that_is_killed_is_replaced_and_the_work_goes_on(self, stage: Stage) -> None:
        first = stage.worker()
        held, id = stage.hold(timeout=60.0)
        first.kill()
        stage.worker()
        eventually(lambda: stage.attempt(held) == 2, "another attempt watches the work")
        stage.is_watched(held)
        stage.harness.let_go(id, "done")
        assert held.result(60) == "done"
        assert stage.harness.started(id) == 1
        assert stage.failures(held) == 0

    def test_time_runs_from_the_start_and_not_from_the_last_watcher(self, stage: Stage) -> None:
        first = stage.worker()
        began = time.monotonic()
        held, id = stage.hold(timeout=6.0)
        first.kill()
        eventually(lambda: time.monotonic() - began > 2.0, "part of its timeout has passed")
        stage.worker()
        with pytest.raises(TaskFailed, match="timeout"):
            held.result(60)
        task = stage.shown(held)
        assert task.started_at is not None
        assert task.ended_at is not None
        ran = (task.ended_at - task.started_at).total_seconds()
        assert ran < 6, "the timeout did not start again with the last watcher"
        eventually(lambda: not stage.harness.is_running(id), "the remote side has ended the work")

    def test_work_that_is_cancelled_while_nobody_watches_is_ended_by_the_next_worker(self, stage: Stage) -> None:
        first = stage.worker()
        held, id = stage.hold()
        assert first.stop() == 0
        eventually(lambda: held.status() == "pending", "the task is returned")
        held.cancel()
        with pytest.raises(TaskCancelled):
            held.result(60)
        assert stage.harness.is_running(id)
        stage.worker()
        eventually(lambda: not stage.harness.is_running(id), "the remote side has ended the work")
        assert stage.harness.started(id) == 1


def _pass(seconds: float) -> None:
    began = time.monotonic()
    eventually(lambda: time.monotonic() - began > seconds, "time passes")
