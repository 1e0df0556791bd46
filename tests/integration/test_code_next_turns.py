"""The report that ends a step carries the next turn, which counts if nothing else happened to the run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from orchestrator import WorkflowContext, unguarded
from orchestrator.domain.code.activation import Activated
from orchestrator.domain.tasks.outcomes import Flush
from orchestrator.domain.tasks.task import Dispatch, Succeeded
from orchestrator.sdk.code.engine import Engine, replay
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.transport.codec import encode
from tests.integration.code_stage import act, activation, kinds, run_row
from tests.integration.stage import ONE, System, Worker, raw

MEANWHILE: dict[int, Callable[[], object]] = {}
"""By step number: what happens once, in another thread, when the code is about to begin the step."""


def meanwhile(number: int) -> None:
    thread = threading.Thread(target=MEANWHILE.pop(number, lambda: None))
    thread.start()
    thread.join()


@pytest.fixture
def worker(system: System) -> Worker:
    system.worker("other", knows=("job", "steps"))
    return system.worker("w1", knows=("job", "steps"))


@pytest.fixture
def steps(system: System) -> CodeWorkflow[..., Any]:
    job = system.job

    @system.app.workflow(name="steps")
    async def steps(ctx: WorkflowContext, count: int, together: bool = False) -> list[Any]:
        done: list[Any] = []
        for number in range(count):
            with unguarded():
                meanwhile(number)
            tasks = [job.schedule(number) for _ in range(1 + together)]
            done += [await task for task in tasks]
            ctx.set("at", str(ctx.now()))
        return [*done, len(ctx.signals("news"))]

    return steps


def begin(system: System, worker: Worker, engine: Engine) -> list[Dispatch]:
    """Let the code take its first turn; return its tasks."""
    system.pass_seconds()
    (first,) = [task for worker in system.workers for task in worker.take()]
    worker.report(act(engine, first))
    system.pass_seconds()
    return worker.take()


def succeed(worker: Worker, engine: Engine, task: Dispatch) -> Activated:
    """Report the success of a step together with the turn that follows it."""
    assert task.run_id is not None
    turn = engine.follow(task.run_id, task.id, ONE, lambda attempt: attempt, task.at)
    assert turn is not None
    worker.held = [attempt for attempt in worker.held if attempt[0] != task.id]
    worker.flush(encode(Flush(worker.name, [Succeeded(task.id, task.attempt, 0.1, ONE)], [turn])))
    return turn


def test_a_step_takes_one_tick_and_stays_with_its_worker(
    system: System, worker: Worker, engine_: Engine, steps: CodeWorkflow[..., Any]
) -> None:
    handle = steps.start(5)
    (task,) = begin(system, worker, engine_)
    for left in range(4, 0, -1):
        turn = succeed(worker, engine_, task)
        system.tick()
        (task,) = worker.take()  # the next task, and no turn
        assert not task.is_turn_task
        row = run_row(system, handle)
        assert (row["open"], row["success"], row["cached"]) == (1, 5 - left, turn.attempt)
    assert system.scheduler.term.dispatcher.in_flight == 1
    succeed(worker, engine_, task)
    system.tick()
    assert handle.result(0) == [1, 1, 1, 1, 1, 0]
    assert system.scheduler.term.dispatcher.in_flight == 0
    step = ["task_completed", "activation_applied", "state_set"]
    first = ["run_started", "activation_applied", "task_scheduled"]
    assert kinds(system, handle) == [*first, *(4 * [*step, "task_scheduled"]), *step, "run_completed"]
    replay(steps, handle.history(), exactly=True)


@pytest.mark.parametrize("ahead", [0, 3_600])
def test_the_times_of_a_history_never_decrease(
    system: System, worker: Worker, engine_: Engine, steps: CodeWorkflow[..., Any], ahead: int
) -> None:
    handle = steps.start(3)
    set_back = "UPDATE orchestrator.histories SET at = at + CAST(:ahead AS int) * interval '1 second' RETURNING 1"
    system.sql(set_back, ahead=ahead)
    (task,) = begin(system, worker, engine_)
    for _ in range(2):
        succeed(worker, engine_, task)
        system.tick()
        (task,) = worker.take()
    handle.signal("news", 1)
    system.tick()
    times = [event.at for event in handle.history().events]
    assert times == sorted(times)
    assert kinds(system, handle)[-1] == "signal_received"


def test_cancelling_a_task_just_scheduled_in_a_next_turn_is_recorded(
    system: System, worker: Worker, engine_: Engine
) -> None:
    job = system.job

    @system.app.workflow(name="steps")
    async def cancelling(ctx: WorkflowContext) -> int:
        await job.schedule()
        job.schedule().cancel()
        await ctx.sleep(1_000)
        return 1

    handle = cancelling.start()
    (task,) = begin(system, worker, engine_)
    succeed(worker, engine_, task)
    system.tick(2)
    assert "task_cancelled" in kinds(system, handle)


def test_a_next_turn_that_missed_a_signal_is_dropped(
    system: System, worker: Worker, engine_: Engine, steps: CodeWorkflow[..., Any]
) -> None:
    handle = steps.start(2)
    (task,) = begin(system, worker, engine_)
    handle.signal("news", 1)
    system.tick()
    turn = succeed(worker, engine_, task)
    system.tick()
    (sent,) = worker.take()
    assert sent.is_turn_task
    assert run_row(system, handle)["cached"] < turn.attempt
    missing = act(engine_, sent)
    assert missing.missing  # the code in memory has seen an event that is not in the history
    worker.report(missing)
    system.tick()
    (whole,) = [task for worker in system.workers for task in worker.take()]
    worker.report(act(engine_, whole))
    system.tick()
    (task,) = worker.take()
    succeed(worker, engine_, task)
    system.tick()
    assert handle.result(0) == [1, 1, 1]
    replay(steps, handle.history(), exactly=True)


def test_a_duplicate_report_counts_once(
    system: System, worker: Worker, engine_: Engine, steps: CodeWorkflow[..., Any]
) -> None:
    handle = steps.start(2)
    (task,) = begin(system, worker, engine_)
    turn = succeed(worker, engine_, task)
    again = encode(Flush(worker.name, [Succeeded(task.id, task.attempt, 0.1, ONE)], [turn]))
    worker.flush(again)
    system.tick()
    worker.flush(again)
    system.tick()
    assert kinds(system, handle).count("task_completed") == 1
    assert kinds(system, handle).count("task_scheduled") == 2
    (task,) = worker.take()
    succeed(worker, engine_, task)
    system.tick()
    assert handle.result(0) == [1, 1, 0]


def test_code_that_waits_for_more_than_one_task_is_sent_its_turns(
    system: System, worker: Worker, engine_: Engine, steps: CodeWorkflow[..., Any]
) -> None:
    steps.start(1, together=True)
    system.pass_seconds()
    (first,) = [task for worker in system.workers for task in worker.take()]
    report = act(engine_, first)
    assert report.awaits == b""
    worker.report(report)
    system.pass_seconds()
    tasks = [task for worker in system.workers for task in worker.take()]
    assert len(tasks) == 2
    assert not any(engine_.may_follow(first.id, task.id) for task in tasks)


def test_a_leader_of_the_previous_release_is_sent_no_next_turns(
    system: System, worker: Worker, engine_: Engine, steps: CodeWorkflow[..., Any]
) -> None:
    steps.start(2)
    system.pass_seconds()
    (first,) = [task for worker in system.workers for task in worker.take()]
    told = msgspec.structs.replace(activation(first), may_follow=False)
    worker.report(engine_.activate(told, first.id, first.attempt))
    system.pass_seconds()
    (task,) = worker.take()
    assert not engine_.may_follow(first.id, task.id)


def test_a_turn_that_the_leader_sends_replaces_a_next_turn_of_the_same_number(
    system: System, worker: Worker, engine_: Engine, steps: CodeWorkflow[..., Any]
) -> None:
    """A busy worker is sent the whole history, and takes that turn while its code still takes the next turn."""
    handle = steps.start(2)
    (task,) = begin(system, worker, engine_)
    worker.held = [(bytes(16), number) for number in range(100)]  # no free slot
    worker.beat()
    handle.signal("news", 1)
    system.pass_seconds()
    (whole,) = [sent for other in system.workers for sent in other.take()]
    assert activation(whole).after == 0
    worker.held = []
    sent: list[Activated] = []
    MEANWHILE[1] = lambda: sent.append(act(engine_, whole))
    turn = succeed(worker, engine_, task)
    assert sent[0].attempt == turn.attempt
    worker.report(*sent)
    finish(system, worker, engine_)
    assert handle.result(0) == [1, 1, 1]
    replay(steps, handle.history(), exactly=True)


def test_a_next_turn_counts_only_from_the_worker_that_took_the_last_turn(
    system: System, worker: Worker, engine_: Engine, steps: CodeWorkflow[..., Any]
) -> None:
    """Another worker may have code that has not seen a signal, and come to the same number of events."""
    handle = steps.start(3)
    (task,) = begin(system, worker, engine_)
    other = next(one for one in system.workers if one is not worker)
    turn = engine_.follow(raw(handle), task.id, ONE, lambda attempt: attempt, task.at)
    assert turn is not None
    other.flush(encode(Flush(other.name, [Succeeded(task.id, task.attempt, 0.1, ONE)], [turn])))
    system.tick()
    assert run_row(system, handle)["cached"] < turn.attempt
    finish(system, worker, engine_)
    assert handle.result(0) == [1, 1, 1, 0]


def finish(system: System, worker: Worker, engine: Engine) -> None:
    """Take turns and run steps separately until none is left."""
    for _ in range(20):
        system.pass_seconds()
        taken = [task for one in system.workers for task in one.take()]
        if not taken:
            return
        for task in taken:
            worker.report(act(engine, task) if task.is_turn_task else Succeeded(task.id, task.attempt, 0.1, ONE))
    raise AssertionError("it never ends")
