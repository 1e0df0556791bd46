"""Odd names, ids and texts in calls about runs of code are refused by errors of this package, and nothing is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator import OrchestratorError, WorkflowContext, WorkflowHandle
from tests.integration.stage import System

Call = Callable[[WorkflowHandle[Any], str], object]
NAMED: dict[str, Call] = {
    "signal": lambda handle, text: handle.signal(text, 1),
    "resolve": lambda handle, text: handle.resolve(text, 1),
    "reject": lambda handle, text: handle.reject(text, "no"),
    "query": lambda handle, text: handle.query(text, timeout=0.1),
    "update": lambda handle, text: handle.update(text, timeout=0.1),
    "reason": lambda handle, text: handle.reject("approval", text),
    "update id": lambda handle, text: handle.update_handle(text).stage(),
    "signal id": lambda handle, text: handle.options(id=text).signal("go"),
    "reset": lambda handle, text: handle.reset(to=text),  # type: ignore[arg-type]
}
TEXTS = {"a NUL": "a\0", "half a surrogate pair": "a \ud800", "two megabytes": "x" * 2_000_000}


@pytest.fixture
def handle(system: System) -> WorkflowHandle[Any]:
    @system.app.workflow(name="waits")
    async def waits(ctx: WorkflowContext) -> None:
        await ctx.promise("approval")

    handle = waits.start()
    system.pass_seconds()
    return handle


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("call", NAMED)
def test_an_odd_text_is_refused_where_it_is_given(
    system: System, handle: WorkflowHandle[Any], call: str, text: str
) -> None:
    with pytest.raises(OrchestratorError) as refused:
        NAMED[call](handle, TEXTS[text])
    assert len(str(refused.value)) < 1_000
    assert "found" in str(refused.value), "and not after waiting for an answer"
    assert not system.sql("SELECT FROM orchestrator.inbox")


@pytest.mark.parametrize("text", TEXTS)
def test_an_odd_id_is_refused_where_a_run_is_looked_up(system: System, handle: WorkflowHandle[Any], text: str) -> None:
    del handle
    with pytest.raises(OrchestratorError, match="A run id is a string of 1 to 500 printable characters"):
        system.app.code_workflows["waits"].find(TEXTS[text])


@pytest.mark.parametrize("number", ["3", True, 1.0, -1, 10**30])
def test_a_reset_to_what_is_no_event_number_is_refused(handle: WorkflowHandle[Any], number: Any) -> None:
    with pytest.raises(OrchestratorError, match="Expected the number of an event of the history, found"):
        handle.reset(to=number)


def test_a_signal_has_one_value(system: System, handle: WorkflowHandle[Any]) -> None:
    send: Any = handle.signal
    for args, kwargs in (((1, 2), {}), ((1,), {"value": 2}), ((), {"other": 1})):
        with pytest.raises(OrchestratorError, match="Signal 'go': expected one value or none"):
            send("go", *args, **kwargs)
    send("go", value=1)
    assert len(system.sql("SELECT FROM orchestrator.inbox")) == 1


def test_a_reason_may_have_several_lines(system: System, handle: WorkflowHandle[Any]) -> None:
    with pytest.raises(OrchestratorError, match="no scheduler"):
        handle.reject("approval", "x\n" * 5_000)
    assert len(system.sql("SELECT FROM orchestrator.inbox")) == 1
