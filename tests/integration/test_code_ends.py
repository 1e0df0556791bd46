"""Notifications of the end of a code run."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import RunFailed, WorkflowContext
from orchestrator.domain.code.activation import Activated
from orchestrator.domain.code.commands import CancelRun, Command, CompleteRun, ContinueRun, FailRun
from orchestrator.domain.ids import successor_id
from orchestrator.domain.tasks.task import TaskError
from orchestrator.sdk.code.handle import WorkflowHandle
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.sdk.dag import definitions
from orchestrator.transport.codec import Ended, decode
from tests.integration.stage import KEYS, ONE, System, Worker, raw
from tests.waiting import eventually

NO = FailRun(TaskError("ValueError", "no"))
AGAIN = ContinueRun(b"\x92\x90\x80")
"""With no arguments."""


@pytest.fixture
def order(system: System) -> CodeWorkflow[..., Any]:
    @system.app.workflow(name="shop.order", timeout=60)
    async def order(ctx: WorkflowContext, *items: str, customer: str = "") -> int:
        return 1

    return order


@pytest.fixture
def worker(system: System) -> Worker:
    return system.worker(knows=("job", "shop.order"))


def play(system: System, worker: Worker, *ends: Command) -> None:
    """For each command, let all due turns of code end with that command."""
    for end in ends:
        system.pass_seconds(2)
        turns = [task for task in worker.take() if task.is_turn_task]
        assert turns
        worker.report(*(Activated(turn.id, turn.attempt, 0.1, through=1, commands=[end]) for turn in turns))
        system.tick()


def waits(system: System, name: str, on: str, *, params: str = "{}") -> None:
    """Apply a workflow triggered by the end of another."""
    text = f"name: {name}\non: [{on}]\nparams: {params}\ntasks: {{only: {{task: job}}}}\n"
    system.app.workflows.apply(definitions.loads(text))


def started(system: System, name: str) -> list[dict[str, Any]]:
    rows = system.sql("SELECT * FROM orchestrator.runs WHERE workflow = :name ORDER BY id", name=name)
    return [dict(row) for row in rows]


def test_workflows_that_wait_for_an_end_start_once_each(
    system: System, order: CodeWorkflow[..., Any], worker: Worker
) -> None:
    waits(system, "thank", "{workflow: shop.order}")
    waits(system, "console", "{workflow: shop.order, state: failed}")
    waits(system, "count", "{workflow: shop.order, state: ended}")
    waits(system, "other", "{workflow: shop.orders, state: ended}")
    for end in (CompleteRun(ONE), NO, CancelRun()):
        order.start()
        play(system, worker, end)
    assert [len(started(system, name)) for name in ("thank", "console", "count", "other")] == [1, 1, 3, 0]
    system.pass_seconds()
    assert system.count("tasks") == 5


def test_many_ends_of_one_tick_start_a_run_each(system: System, order: CodeWorkflow[..., Any], worker: Worker) -> None:
    waits(
        system,
        "thank",
        "{workflow: shop.order, filter: \"${event.params.customer != 'Bob'}\","
        ' params: {who: "${event.params.customer}", first: "${event.args[0]}", run: "${event.run_id}"}}',
        params="{who: {}, first: {}, run: {}}",
    )
    handles = [order.start("tea", "milk", customer=name) for name in ("Ann", "Bob", "Cid")]
    play(system, worker, CompleteRun(ONE))
    given = {run["params"]["who"]: run["params"] for run in started(system, "thank")}
    assert given == {
        "Ann": {"who": "Ann", "first": "tea", "run": handles[0].id},
        "Cid": {"who": "Cid", "first": "tea", "run": handles[2].id},
    }


def test_a_run_that_continues_has_not_ended(system: System, order: CodeWorkflow[..., Any], worker: Worker) -> None:
    waits(
        system,
        "count",
        '{workflow: shop.order, state: ended, params: {run: "${event.run_id}"}}',
        params="{run: {}}",
    )
    first = order.start()
    play(system, worker, AGAIN, AGAIN)
    assert started(system, "count") == []
    play(system, worker, CompleteRun(ONE))
    last = WorkflowHandle[int](system.app._client, successor_id(successor_id(raw(first))))
    assert [run["params"] for run in started(system, "count")] == [{"run": last.id}]


def test_a_run_that_is_terminated_has_ended(system: System, order: CodeWorkflow[..., Any], worker: Worker) -> None:
    waits(system, "count", "{workflow: shop.order, state: ended}")
    order.start().terminate()
    system.pass_seconds(2)
    assert len(started(system, "count")) == 1


def announced(system: System, handle: WorkflowHandle[Any], worker: Worker, *ends: Command) -> list[tuple[str, Any]]:
    """Return the messages to waiting clients while a run ends."""
    heard: list[Ended] = []
    listener = system.redis.pubsub()  # type: ignore[no-untyped-call]
    listener.subscribe(KEYS.done(raw(handle)))

    def next_message() -> Any:
        return eventually(lambda: listener.get_message(timeout=0.01), "a message")

    next_message()  # the subscription is active
    play(system, worker, *ends)
    system.redis.publish(KEYS.done(raw(handle)), b"that is all")
    while (said := next_message()["data"]) != b"that is all":
        heard += decode(list[Ended], said)
    listener.close()
    return [(item.state, item.result or (item.error and item.error.kind)) for item in heard if item.id == raw(handle)]


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (CompleteRun(ONE), ("success", ONE)),
        (NO, ("failed", "ValueError")),
        (CancelRun(), ("cancelled", "Cancelled")),
        (AGAIN, ("success", None)),
    ],
)
def test_clients_are_told_once_how_a_run_ended(
    system: System, order: CodeWorkflow[..., Any], worker: Worker, end: Command, told: tuple[str, Any]
) -> None:
    assert announced(system, order.start(), worker, end) == [told]


def test_a_waiting_client_is_notified_of_a_timeout(
    system: System, order: CodeWorkflow[..., Any], worker: Worker
) -> None:
    """The turn task was cancelled, but the run has failed, both for notified clients and for readers."""
    handle = order.start()
    system.lead(offset=61)
    assert announced(system, handle, worker, CancelRun()) == [("failed", "RunTimedOut")]
    with pytest.raises(RunFailed, match=r"failed: RunTimedOut: The run took longer than it may\."):
        handle.result(0)


def test_a_late_continuation_of_a_terminated_run_is_ignored(
    system: System, order: CodeWorkflow[..., Any], worker: Worker
) -> None:
    handle = order.start()
    system.pass_seconds()
    (turn,) = worker.take()
    handle.terminate()
    worker.report(Activated(turn.id, turn.attempt + 1, 0.1, through=1, commands=[AGAIN]))
    system.pass_seconds(2)
    assert handle.status() == "terminated"
    assert len(started(system, "shop.order")) == 1
