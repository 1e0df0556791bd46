"""Every call about a task or run behaves the same in shard 1 as in shard 0."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
import pytest
import sharing

from orchestrator import OrchestratorError
from orchestrator.domain.access import Scope
from orchestrator.sdk.calls.declaring import Declared, Kind, declared
from orchestrator.sdk.calls.interface import PARTS
from orchestrator.sdk.dag.definitions import from_data
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.values.payload import encode_call, encode_value
from orchestrator.sdk.waiting.steps import complete
from orchestrator.store.code.keys import Sent
from tests.acceptance.conftest import SHARDS
from tests.acceptance.stack import Stack
from tests.acceptance.test_shards import SHARING, start
from tests.waiting import eventually

CALLS = [
    call
    for part, protocol in PARTS.items()
    for call in declared(part, protocol).values()
    if {Kind.TASK, Kind.RUN, Kind.TASK_OR_RUN} & {*(call.rules.about or {})}
]
ANSWERED = {"code.resolve", "code.reject", "code.query", "code.update", "code.update_answer", "code.reset"}
"""Calls that cannot succeed unless the leader of the run has done them."""
WORD = encode_value("a word", "It", 1_000)
GIVEN: dict[str, Any] = {
    "decision": "approved",
    "from_step": None,
    "id": "mine",
    "key": "paid",
    "name": "say",
    "payload": encode_call("say", ["a word"], {}, 1_000),
    "position": -1,
    "promise": "done",
    "reason": "r",
    "step": None,
    "timeout": 20.0,
    "to": 1,
    "value": WORD,
    "what": "update",
}
"""Arguments that do not identify the task or run."""
SPECIAL: dict[str, dict[str, Any]] = {
    "code.query": {"name": "word", "payload": encode_call("word", [], {}, 1_000)},
    "flows.signal": {"value": True},
}


TASKS = {"ended": "success", "failed": "failed", "delayed": "pending"}
"""Kinds of tasks, with the state in which each stays."""


def view_of(kind: str, id: str) -> Any:
    """Return the view of a task or run."""
    insights = sharing.app._client.backend.insights
    return (insights.show_task if kind in TASKS else insights.show_run)(UUID(id))


def ready(kind: str, id: str) -> str:
    """Wait until a task or run ends or waits for input; return its id."""

    def is_ready() -> bool:
        if kind == "code":
            code = sharing.app._client.backend.insights.show_code(UUID(id))
            return code is not None and "done" in repr(code)
        return bool(view_of(kind, id).status == TASKS.get(kind, "running" if kind == "flow" else "success"))

    eventually(is_ready, f"{kind} {id} waits or has ended")
    return id


@pytest.fixture
def twins(sharded: Stack) -> Callable[[str], list[str]]:
    """Return a function that creates a task or run in each shard."""
    start(sharded, *SHARING)
    app = sharing.app
    app.flows.publish("asks", {"start": "ask", "nodes": {"ask": {"kind": "approval"}}})
    app._client.backend.workflows.apply(from_data({"name": "one", "tasks": {"a": {"task": "sharing.says"}}}))
    makers: dict[str, Callable[[], Any]] = {
        "ended": sharing.says.enqueue,
        "failed": sharing.fails.enqueue,
        "delayed": sharing.says.options(delay=3600.0).enqueue,
        "code": sharing.answers.start,
        "flow": app.flows["asks"].start,
        "dag": app.workflows["one"].start,
        "many": lambda: app.start_many(sharing.says, [(), ()]),
    }

    def make(kind: str) -> list[str]:
        found: dict[int, str] = {}
        while len(found) < SHARDS:
            id = makers[kind]().id
            found[sharded.scalar(f'SELECT shard FROM "{sharded.settings.root}".places WHERE id = :id', id=id)] = id
        return [ready(kind, found[shard]) for shard in range(SHARDS)]

    return make


def kinds_of(call: Declared) -> list[str]:
    """Return the kinds of tasks or runs that a call accepts."""
    if call.part in ("code", "flows"):
        return [call.part.removesuffix("s")]
    tasks, runs = ["ended", "failed", "delayed"], ["code", "flow", "dag", "many"]
    return {Kind.TASK: tasks, Kind.RUN: runs, Kind.TASK_OR_RUN: tasks + runs}[next(iter(call.rules.about or {}))]


def shape(value: Any) -> Any:
    """Return a value without the parts that differ between two tasks or runs: ids, times and numbers."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [shape(one) for one in value]
    if isinstance(value, str):
        return re.sub(r"\b[0-9a-f-]*[0-9][0-9a-f-]*\b", "#", value)
    return value if value is None or isinstance(value, bool) else type(value).__name__


def outcome_of(call: Declared, id: str) -> Any:
    """Make a call about a task or run; return the shape of its result or error."""
    backend = sharing.app._client.backend
    args: dict[str, Any] = {}
    (about,) = (call.rules.about or {}).values()
    given = GIVEN | SPECIAL.get(f"{call.part}.{call.name}", {})
    for name, parameter in list(call.signature.parameters.items())[1:]:
        if name == about:
            args[name] = UUID(id) if call.arguments[name] is UUID else UUID(id).bytes
        elif name == about.partition(".")[0]:
            args[name] = Sent(UUID(id).bytes, new_id(), 1)
        elif name == "request" and parameter.default is parameter.empty:
            args[name] = new_id()
            sent = backend.code.update(UUID(id).bytes, "say", GIVEN["payload"], 20.0, args[name])
            complete(sent)
        elif parameter.default is parameter.empty:
            args[name] = new_id() if name == "new" else given[name]
    try:
        found = getattr(getattr(backend, call.part), call.name)(**args)
        found = complete(found) if call.waits else found
    except OrchestratorError as error:
        assert f"{call.part}.{call.name}" not in ANSWERED, error
        found = f"{type(error).__name__}: {error}"
    return shape(msgspec.to_builtins(found, builtin_types=(bytes, datetime)))


def test_every_call_behaves_the_same_in_each_shard(twins: Callable[[str], list[str]], sharded: Stack) -> None:
    kept: dict[str, list[str]] = {}
    different = []
    for call in CALLS:
        is_reading = call.rules.scope is Scope.READ or (call.rules.for_programs and not call.waits)
        for kind in kinds_of(call):
            if is_reading and kind not in kept:
                kept[kind] = twins(kind)
            ids = kept[kind] if is_reading else twins(kind)
            found = [outcome_of(call, id) for id in ids]
            give_up_at = time.monotonic() + 10
            while is_reading and found[0] != found[1] and time.monotonic() < give_up_at:  # logs are stored later
                found = [outcome_of(call, id) for id in ids]
            if found[0] != found[1]:
                different.append((call.part, call.name, kind, *found))
            elif not is_reading:
                settle(sharded, f"{call.part}.{call.name}", kind, ids)
    assert not different, "\n".join(map(repr, different))


def settle(stack: Stack, call: str, kind: str, ids: list[str]) -> None:
    """Wait until the leaders have applied a call, and have applied it in the same way."""
    eventually(lambda: not stack.scalar(f'SELECT count(*) FROM "{stack.settings.root}/all".inbox'), "all is done")
    eventually(
        lambda: len({getattr(view_of(kind, id), "status", None) for id in ids}) == 1, f"{call} changes each {kind}"
    )
