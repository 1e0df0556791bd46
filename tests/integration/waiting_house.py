"""Runs that wait for a person: one of a flow at an approval, one of a code workflow at a promise."""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import Any
from uuid import UUID

from orchestrator.domain import timezones
from orchestrator.domain.code import history
from orchestrator.domain.flow.state import FlowState, Frame, Wait
from orchestrator.sdk.backend import Backend
from orchestrator.sdk.flow import reading
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.values.conversion import schema_of
from orchestrator.sdk.values.payload import encode_call
from orchestrator.store.code.histories import event_rows
from tests.integration.api_house import House

FLOW_WITH_APPROVAL = {
    "start": "ask",
    "nodes": {
        "ask": {"kind": "approval", "description": "Is it within the budget?"},
        "again": {"kind": "timer", "params": {"delay_ms": 1000}},
        "ship": {"exec_type": "local_func", "func": "t.a"},
    },
    "edges": [
        {"from": "ask", "action": "approved", "to": "ship"},
        {"from": "ask", "action": "rejected", "to": "again"},
        {"from": "again", "to": "ask"},
    ],
}


def flow_that_asks(house: House, name: str, at: str = "ask", fields: Any = MappingProxyType({"amount": 1_100})) -> UUID:
    """Create a run of the flow `NAME-asks` at the node `at`, after one completed node."""
    backend = Backend(house.settings)
    try:
        backend.flows.publish(f"{name}-asks", reading.from_data(FLOW_WITH_APPROVAL))
        run = backend.flows.start(f"{name}-asks", {"amount": 1_100}, new_id())
    finally:
        backend.close()
    frame = Frame(at, {"customer": f"customer of {name}"}, entered=time.time() - 600)
    wait = Wait("signal", fields and dict(fields), key=at) if at == "ask" else Wait("timer", due=time.time() + 60)
    state = timezones.encode(FlowState([frame], wait, steps=2, recorded=1).to_plain())
    with house.engine.connect() as connection:
        connection.exec_driver_sql(
            "UPDATE orchestrator.runs SET status = 'running', started_at = now(), state = %s WHERE id = %s",
            (state, UUID(bytes=run).hex),
        )
        connection.exec_driver_sql(
            "INSERT INTO orchestrator.node_runs (run_id, number, node, kind, status, attempt, action, first_call,"
            " calls, started_at, ended_at)"
            " VALUES (%s, 1, 'again', 'timer', 'success', 1, 'default', 0, 0, now(), now())",
            (UUID(bytes=run).hex,),
        )
    return UUID(bytes=run)


def code_that_asks(house: House, name: str, promises: int = 1, value_type: Any = Any) -> UUID:
    """Create a run of the workflow `NAME-code` that waits for promises of a type."""
    run = UUID(bytes=new_id())
    with house.engine.connect() as connection:
        connection.exec_driver_sql(
            "INSERT INTO orchestrator.runs (id, name, workflow, version, status, total, open, code)"
            " VALUES (%s, %s, %s, 1, 'running', 1, 1, true)",
            (run.hex, f"{name}-code", f"{name}-code"),
        )
        start = history.RunStarted(f"{name}-code", 1, encode_call("code", ["pear"], {"amount": 1_250}, 1_000))
        ((_, number, kind, data),) = event_rows(run.bytes, [start])
        connection.exec_driver_sql(
            "INSERT INTO orchestrator.histories (run_id, number, at, kind, data) VALUES (%s, %s, now(), %s, %s)",
            (run.hex, number, kind, data),
        )
        for ordinal in range(1, promises + 1):
            promise = history.PromiseCreated(ordinal, new_id(), f"approval-{ordinal}", schema_of(value_type))
            connection.exec_driver_sql(
                "INSERT INTO orchestrator.promises (run_id, id, name, ordinal) VALUES (%s, %s, %s, %s)",
                (run.hex, UUID(bytes=promise.id).hex, promise.name, ordinal),
            )
            ((_, _, kind, data),) = event_rows(run.bytes, [promise])
            connection.exec_driver_sql(
                "INSERT INTO orchestrator.histories (run_id, number, at, kind, data)"
                " VALUES (%s, %s, now() - interval '1 hour' * %s, %s, %s)",
                (run.hex, ordinal + 1, ordinal, kind, data),
            )
    return run
