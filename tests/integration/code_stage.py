"""What tests of runs of code share: turns of the code, taken by hand, and what is stored of them."""

from __future__ import annotations

from typing import Any

from orchestrator import WorkflowHandle
from orchestrator.domain.code.activation import Activated, Activation
from orchestrator.domain.tasks.task import Dispatch
from orchestrator.sdk.code.engine import Engine
from orchestrator.transport.codec import decode
from tests.integration.stage import System


def activation(dispatch: Dispatch) -> Activation:
    assert dispatch.is_activation
    return decode(Activation, dispatch.payload)


def act(engine: Engine, dispatch: Dispatch) -> Activated:
    return engine.activate(activation(dispatch), dispatch.id, dispatch.attempt)


def kinds(system: System, handle: WorkflowHandle[Any]) -> list[str]:
    rows = system.sql(
        "SELECT kind FROM orchestrator.histories WHERE run_id = CAST(:id AS uuid) ORDER BY number", id=handle.id
    )
    return [row["kind"] for row in rows]


def run_row(system: System, handle: WorkflowHandle[Any]) -> dict[str, Any]:
    return dict(system.sql("SELECT * FROM orchestrator.runs WHERE id = CAST(:id AS uuid)", id=handle.id)[0])
