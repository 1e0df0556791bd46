"""Tasks that enqueue tasks."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import Retry
from orchestrator.domain.ids import derived_id
from orchestrator.domain.tasks.outcomes import Report
from orchestrator.domain.tasks.task import Dispatch, Enqueued, Failed, Lost, NewTask, Succeeded
from tests.integration.stage import ERROR, ONE, System
from tests.waiting import eventually


def child_of(task: Dispatch, number: int, **changes: Any) -> NewTask:
    identifier = derived_id(task.id, task.attempt, number)
    return NewTask(**{"id": identifier, "name": "job", "queue": "default", "payload": b"\x92\x90\x80", **changes})


def test_tasks_enqueued_by_a_task_are_created_once(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    children = Enqueued([child_of(task, 1, priority=5), child_of(task, 2)])
    worker.report(children)
    worker.report(children)  # in one batch
    system.tick()
    worker.report(children)  # in another batch
    system.tick()
    assert system.count("tasks") == 3
    assert system.row(children.tasks[0].id)["priority"] == 5
    worker.succeed(task, *worker.take())
    system.tick()
    assert (system.count("tasks"), system.count("ended_tasks")) == (0, 3)
    worker.report(children)  # after the children have ended
    system.pass_seconds(2)
    assert (system.count("tasks"), system.count("ended_tasks")) == (0, 3)
    assert handle.status() == "success"
    assert system.quarantine() == []


def test_tasks_enqueued_by_a_task_stay_when_it_fails(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    child = child_of(task, 1)
    worker.report(Enqueued([child]), Failed(task.id, 1, 0.1, ERROR))
    system.tick()
    assert handle.status() == "failed"
    assert system.row(child.id)["status"] == "dispatched"


def test_on_success_children_start_only_with_the_current_attempt(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    (first,) = worker.take()
    worker.report(Lost(first.id, 1, alone=False))
    system.tick()
    (second,) = worker.take()
    assert second.attempt == 2
    early, late = child_of(first, 1), child_of(second, 1)
    worker.report(Succeeded(first.id, 1, 0.1, ONE, [early]))  # late: another attempt is current
    system.tick()
    assert handle.status() == "dispatched"
    assert system.count("tasks") == 1
    worker.report(Succeeded(second.id, 2, 0.1, ONE, [late]))
    worker.report(Succeeded(second.id, 2, 0.1, ONE, [late]))
    system.tick(2)
    assert handle.status() == "success"
    assert [row["id"].bytes for row in system.sql("SELECT id FROM orchestrator.tasks")] == [late.id]


def test_a_late_success_of_a_cancelled_task_creates_no_children(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    handle.cancel()
    system.pass_seconds()
    worker.report(Succeeded(task.id, 1, 0.1, ONE, [child_of(task, 1)]))
    system.pass_seconds(2)
    assert (handle.status(), system.count("tasks")) == ("cancelled", 0)


def test_a_success_reported_with_the_cancel_counts_with_its_children(system: System) -> None:
    """Within a tick, reports are applied before requests."""
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    handle.cancel()
    worker.report(Succeeded(task.id, 1, 0.1, ONE, [child_of(task, 1)]))
    system.pass_seconds()
    assert (handle.status(), system.count("tasks")) == ("success", 1)


def test_a_child_with_a_delay_waits(system: System) -> None:
    worker = system.worker()
    (_,) = system.dispatch()
    (task,) = worker.take()
    worker.report(Enqueued([child_of(task, 1, delay=60.0)]), Succeeded(task.id, 1, 0.1, ONE))
    system.pass_seconds(2)
    assert worker.take() == []
    system.lead(offset=61)
    system.pass_seconds()
    assert len(worker.take()) == 1


@pytest.mark.parametrize("what", ["a retry", "a child", "a child on success"])
def test_tasks_due_within_a_second_are_dispatched_in_time(system: System, what: str) -> None:
    """The leader wakes for a short delay, although no second has passed and no nudge has arrived."""
    worker = system.worker()
    system.dispatch(retries=Retry(max=1, base=0.02, jitter=0))
    (task,) = worker.take()
    child = child_of(task, 1, delay=0.02)
    reports: dict[str, Report] = {
        "a retry": Failed(task.id, 1, 0.1, ERROR),
        "a child": Enqueued([child]),
        "a child on success": Succeeded(task.id, 1, 0.1, ONE, [child]),
    }
    system.tick(2)
    worker.report(reports[what])

    def fires() -> list[Dispatch]:
        system.tick()
        return worker.take()

    (due,) = eventually(fires, "the timer fires")
    assert (due.id, due.attempt) == ((task.id, 2) if what == "a retry" else (child.id, 1))
