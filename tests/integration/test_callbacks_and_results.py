"""Callbacks and results of ended tasks, many results at once, and routes to queues."""

from __future__ import annotations

import asyncio
import threading
from typing import Any
from uuid import UUID

import pytest

from orchestrator import (
    InvalidTask,
    Orchestrator,
    ResultTimeout,
    RunFailed,
    TaskCancelled,
    TaskFailed,
    TaskFailure,
    as_completed,
    gather,
)
from orchestrator.domain.tasks.task import Failed, Succeeded, TaskError
from orchestrator.sdk.tasks.failure import describe
from orchestrator.sdk.values.payload import decode_value, encode_value
from tests.integration.stage import System, raw


@pytest.fixture
def follower(system: System) -> Any:
    return system.app.task(name="follower")(lambda what: what)


class Declined(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


def test_attributes_of_an_exception_reach_the_caller(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch(retries=0)
    (task,) = worker.take()
    error = describe(Declined(51, "with \0 and 1e300: \x1b"))
    worker.report(Failed(task.id, 1, 0.1, error))
    system.tick()
    with pytest.raises(TaskFailed) as failed:
        handle.result(20)
    assert failed.value.data == {"code": 51, "text": "with \0 and 1e300: \x1b"}


# -- results of a run


def test_a_partly_failed_run_returns_its_results_and_errors(system: System) -> None:
    worker = system.worker(slots=4)
    run = system.app.start_many(system.job, range(4), name="partly")
    assert run.status() == "pending"
    system.pass_seconds()
    assert run.status() == "running"
    tasks = sorted(worker.take(), key=lambda task: task.position or 0)
    worker.succeed(tasks[0], tasks[3])
    worker.report(Failed(tasks[1].id, 1, 0.1, describe(Declined(51, "no money"))))
    system.tick()
    system.app.handle(UUID(bytes=tasks[2].id)).cancel()
    system.tick_until(lambda: run.status() == "failed")

    with pytest.raises(RunFailed, match=r"1 failed and 1 were cancelled.*`results\(return_exceptions=True\)`"):
        run.results(5)
    results = run.results(5, return_exceptions=True)
    assert [str(result) for result in run.iter_results(5, return_exceptions=True)] == [str(one) for one in results]
    first, failed, cancelled, last = results
    assert (first, last) == (1, 1)
    assert isinstance(failed, TaskFailed)
    assert (failed.kind.rpartition(".")[2], failed.data) == ("Declined", {"code": 51, "text": "no money"})
    assert isinstance(cancelled, TaskCancelled)

    async def main() -> list[Any]:
        assert await run.astatus() == "failed"
        with pytest.raises(RunFailed):
            await run.aresults(5)
        one_by_one = [result async for result in run.aiter_results(5, return_exceptions=True)]
        assert [str(result) for result in one_by_one] == [str(one) for one in results]
        return list(await run.aresults(5, return_exceptions=True))

    assert [str(result) for result in asyncio.run(main())] == [str(one) for one in results]


# -- callbacks


def test_a_success_callback_receives_the_result(system: System, follower: Any) -> None:
    worker = system.worker(knows=["job", "follower"])
    system.dispatch(on_success=follower.options(priority=7))
    (task,) = worker.take()
    worker.report(Succeeded(task.id, 1, 0.1, encode_value({"a": [1, 2]}, "", 100)))
    system.tick()
    (follow,) = worker.take()
    assert (follow.name, decode_value(follow.payload)) == ("follower", [[{"a": [1, 2]}], {}])
    worker.report(Succeeded(task.id, 1, 0.1, b"\xc0"))  # duplicate
    system.pass_seconds()
    assert system.count("tasks") == 1
    assert system.sql("SELECT priority FROM orchestrator.tasks")[0]["priority"] == 7


def test_a_failure_callback_receives_the_final_failure(system: System, follower: Any) -> None:
    worker = system.worker(knows=["job", "follower"])
    (handle,) = system.dispatch(on_failure=[follower, follower], retries=1)
    (task,) = worker.take()
    worker.report(Failed(task.id, 1, 0.1, TaskError("ValueError", "first"), delay=0.0))
    again: list[Any] = []
    system.tick_until(lambda: again.extend(worker.take()) or again)
    assert (len(again), again[0].name) == (1, "job")  # the task is retried: no callback yet
    worker.report(Failed(task.id, 2, 0.1, TaskError("ValueError", "last", "at line 3", '{"code":7}')))
    system.tick()
    follows = worker.take()
    assert [follow.name for follow in follows] == ["follower", "follower"]
    (failure,), _ = decode_value(follows[0].payload)
    expected = TaskFailure(handle.id, "job", "ValueError", "last", "at line 3", {"code": 7})
    assert follower._signature.restore([failure], {})[0] == [failure]
    assert failure == {name: getattr(expected, name) for name in TaskFailure.__struct_fields__}


def test_expiry_runs_the_failure_callback_but_cancellation_does_not(system: System, follower: Any) -> None:
    expired = system.job.options(expires=5, on_failure=follower).enqueue()
    cancelled = system.job.options(on_failure=follower, on_success=follower).enqueue()
    cancelled.cancel()
    system.pass_seconds()
    system.lead(offset=10)
    system.pass_seconds(2)
    assert system.states(expired, cancelled) == ["failed", "cancelled"]
    assert [row["name"] for row in system.sql("SELECT name FROM orchestrator.tasks")] == ["follower"]


def test_callbacks_stay_with_a_task_that_is_retried_by_hand(system: System, follower: Any) -> None:
    worker = system.worker(knows=["job", "follower"])
    (handle,) = system.dispatch(on_success=follower)
    worker.fail(*worker.take(), retryable=False)
    system.tick()
    handle.retry()
    system.pass_seconds(2)
    worker.succeed(*worker.take())
    system.tick()
    assert [task.name for task in worker.take()] == ["follower"]


def test_invalid_callbacks_are_rejected(system: System) -> None:
    keyed = system.app.task(name="keyed", unique_key=lambda what: what)(lambda what: what)
    with pytest.raises(InvalidTask, match="Option on_failure: expected a task, or a list of tasks, found 'mail'"):
        system.job.options(on_failure="mail")
    with pytest.raises(InvalidTask, match="Task 'keyed' cannot follow another"):
        system.job.options(on_success=keyed).enqueue()
    assert system.count("tasks") == 0


def test_a_callback_that_needs_a_result_requires_a_stored_result(system: System) -> None:
    def needs(what: int) -> None: ...
    def takes_none(what: int | None) -> None: ...

    needy = system.app.task(name="needs")(needs)
    with pytest.raises(InvalidTask, match=r"Task 'job' keeps no result .* 'needs', which follows its success"):
        system.job.options(on_success=needy, store_result=False)
    modest = system.app.task(name="takes_none")(takes_none)
    system.job.options(on_success=modest, store_result=False).enqueue()


# -- many results


def test_as_completed_yields_tasks_in_order_of_completion(system: System) -> None:
    worker = system.worker(slots=100)
    handles = system.dispatch(50)
    tasks = worker.take()
    by_id = {task.id: task for task in tasks}
    worker.succeed(*tasks[:10])
    system.tick()
    seen = []
    for handle in as_completed(handles, timeout=30):
        seen.append(handle)
        if len(seen) == 10:
            worker.succeed(*tasks[10:40])
            worker.fail(*tasks[40:], retryable=False)
            system.tick()
    assert sorted(seen, key=lambda handle: handle.id) == sorted(handles, key=lambda handle: handle.id)
    assert {handle.status() for handle in seen[:10]} == {"success"}
    assert len(by_id) == 50


def test_gather_returns_results_in_order_and_optionally_failures(system: System) -> None:
    worker = system.worker()
    handles = system.dispatch(3)
    tasks = {task.id: task for task in worker.take()}
    first, second, third = (tasks[raw(handle)] for handle in handles)
    worker.report(Succeeded(third.id, 1, 0.1, b"\x03"), Succeeded(first.id, 1, 0.1, b"\x01"))
    worker.fail(second, retryable=False)
    system.tick()
    results = gather(handles, timeout=10, return_exceptions=True)
    assert (results[0], results[2]) == (1, 3)
    assert isinstance(results[1], TaskFailed)
    with pytest.raises(TaskFailed):
        gather(handles, timeout=10)


def test_a_wait_timeout_says_how_many_tasks_are_missing(system: System) -> None:
    handles = [system.job.enqueue(number) for number in range(3)]
    handles[0].cancel()
    system.pass_seconds()
    with pytest.raises(ResultTimeout, match="2 tasks had not ended after 0.1 s"):
        list(as_completed(handles, timeout=0.1))
    with pytest.raises(TaskCancelled):
        handles[0].result(timeout=1)
    assert list(as_completed([])) == []
    assert gather([]) == []


def test_results_too_large_for_the_announcement_are_fetched(system: System) -> None:
    worker = system.worker()
    handles = system.dispatch(2)
    large = encode_value("x" * 10_000, "", 100_000)
    waiting = threading.Thread(target=lambda: found.extend(gather(handles, timeout=30)))
    found: list[Any] = []
    waiting.start()
    worker.succeed(*worker.take(), result=large)
    system.tick()
    waiting.join()
    assert [len(value) for value in found] == [10_000, 10_000]


# -- routes


def test_routes_send_tasks_to_queues_by_their_names(system: System) -> None:
    app = Orchestrator(system.settings, routes={"shop.mail.*": "mail", "shop.*": "shop", "*.urgent": "fast"})
    expected = {"shop.mail.send": "mail", "shop.order": "shop", "other.urgent": "fast", "other": "default"}
    for name, queue in expected.items():
        task = app.task(name=name)(lambda: None)
        assert task._new((), {}).queue == queue
        assert task.options(queue="own")._new((), {}).queue == "own"
    with pytest.raises(InvalidTask, match="A queue name has"):
        Orchestrator(system.settings, routes={"*": "two words"})
    app.close()
