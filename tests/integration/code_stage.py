"""Helpers for tests of code workflows: run turns of the code in the test, and read the stored history."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator import WorkflowHandle
from orchestrator.domain.code.activation import Activated, Activation
from orchestrator.domain.tasks.task import Dispatch
from orchestrator.sdk.code.engine import Engine
from orchestrator.transport.codec import decode
from tests.integration.stage import System, Worker


@pytest.fixture
def engine_(system: System) -> Iterator[Engine]:
    """The engine that runs the code of the application's workflows."""
    engine = Engine(system.app.code_workflows.find, 1_000_000)
    yield engine
    engine.close()


def activation(dispatch: Dispatch) -> Activation:
    assert dispatch.is_turn_task
    return decode(Activation, dispatch.payload)


def act(engine: Engine, dispatch: Dispatch) -> Activated:
    return engine.activate(activation(dispatch), dispatch.id, dispatch.attempt)


def turn(system: System, worker: Worker, engine: Engine) -> int:
    """Run one turn of every workflow that has a due turn; return the number of turns."""
    system.pass_seconds()
    turns = [task for task in worker.take() if task.is_turn_task]
    worker.report(*(act(engine, task) for task in turns))
    system.pass_seconds()
    return len(turns)


def rest(system: System, worker: Worker, engine: Engine) -> None:
    """Run turns until none is due."""
    for _ in range(20):
        if not turn(system, worker, engine):
            return
    raise AssertionError("the code never comes to rest")


def kinds(system: System, handle: WorkflowHandle[Any]) -> list[str]:
    rows = system.sql(
        "SELECT kind FROM orchestrator.histories WHERE run_id = CAST(:id AS uuid) ORDER BY number", id=handle.id
    )
    return [row["kind"] for row in rows]


def run_row(system: System, handle: WorkflowHandle[Any]) -> dict[str, Any]:
    return dict(system.sql("SELECT * FROM orchestrator.runs WHERE id = CAST(:id AS uuid)", id=handle.id)[0])
