"""Histories as JSON, and the replay of code against them."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator import DeterminismViolation, InvalidWorkflow, Orchestrator, RunFailed, WorkflowContext, WorkflowFailed
from orchestrator.domain.code import commands, history
from orchestrator.domain.code.history import Event
from orchestrator.domain.tasks.task import TaskError
from orchestrator.sdk.code.recording import ID_FIELDS
from orchestrator.testing import Recording, TestedRun, WorkflowTest, replay
from tests.unit.code_workflows.playing import started

app = Orchestrator()


@app.task(name="fetch")
def fetch(key: str) -> dict[str, Any]: ...


@app.workflow(name="reads")
async def reads(ctx: WorkflowContext, keys: list[str], blob: bytes) -> Any:
    await ctx.run("note", lambda: None)
    ctx.set("keys", keys)
    values = await asyncio.gather(*(fetch.schedule(key) for key in keys), return_exceptions=True)
    await ctx.sleep(1)
    if not ctx.patched("kind"):
        return None
    return [str(values[0]), blob]


def recording() -> Recording:
    async def play(run: TestedRun[Any], _: WorkflowTest) -> Recording:
        await run.result()
        return run.history

    def mock(key: str) -> dict[str, Any]:
        if key == "bad":
            raise ValueError("no such key")
        return {"at": datetime(2026, 2, 3, tzinfo=UTC), "raw": b"\x00\xff", "$odd": {1: [None, 1.5]}}

    return started(reads, play, ["good", "bad"], b"\x01", mocks={fetch: mock})


def test_a_history_survives_json() -> None:
    whole = recording()
    text = whole.to_json()
    assert Recording.from_json(text) == whole
    assert {event["type"] for event in json.loads(text)["events"]} >= {"task_failed", "operation_recorded", "state_set"}


def test_every_kind_of_event_survives_json() -> None:
    error = TaskError("ValueError", "no", "Traceback", phase="refused")
    kinds = [*history.Fact.__args__, *history.Record.__args__, *history.Marker.__args__]
    values = {
        "bool": True,
        "int": 3,
        "str": "text",
        "bytes": b"\x03",
        "TaskError": error,
        "float": 1.5,
        "dict[str, int]": {"a": 1},
        "list[str]": ["a"],
        "RunWanted": None,  # only for the leader; no recording contains it
    }
    for kind in kinds:
        fields = {
            name: b"i" * 16 if name in ID_FIELDS else values[note.split(" |")[0]]
            for base in kind.__mro__
            for name, note in getattr(base, "__annotations__", {}).items()
            if name in kind.__struct_fields__
        }
        whole = Recording(b"r" * 16, [Event(1, 1_700_000_000.5, kind(**fields))])
        assert Recording.from_json(whole.to_json()) == whole


def test_a_history_is_replayed_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "history.json"
    file.write_text(recording().to_json())
    made = replay(reads, file)
    assert [type(command).__name__ for command in made] == [
        *("RecordOperation", "SetState", "ScheduleTask", "ScheduleTask", "StartTimer", "RecordPatch", "CompleteRun")
    ]
    assert replay(reads, file.read_text()) == made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected what `Recording.to_json` writes"),
        ("[]", "expected what `Recording.to_json` writes"),
        ('{"format": 2}', "expected format 1, found 2"),
        ('{"format": 1, "run_id": "x", "events": []}', "expected what"),
        (
            '{"format": 1, "run_id": "00000000-0000-0000-0000-000000000000", '
            '"events": [{"number": 1, "at": "2026-01-01T00:00:00+00:00", "type": "run_startd"}]}',
            "event 1: no event is called 'run_startd'. Did you mean 'run_started'",
        ),
    ],
)
def test_invalid_histories_are_rejected(text: str, message: str) -> None:
    with pytest.raises(InvalidWorkflow, match=message):
        Recording.from_json(text)


def changed(code: Any) -> Any:
    """Return other code under the name of the recorded workflow."""
    app = Orchestrator()
    app.task(name="fetch")(fetch.function)
    return app.workflow(name="reads")(code)


def test_a_violation_names_the_place_and_shows_the_difference() -> None:
    async def code(ctx: WorkflowContext, keys: list[str], blob: bytes) -> None:
        await ctx.run("note", lambda: None)
        ctx.set("keyz", keys)

    with pytest.raises(DeterminismViolation) as found:
        replay(changed(code), recording())
    assert found.value.event == 4
    assert str(found.value).startswith(
        "State key mismatch at state 1 (event 4): history has 'keys' and the code says 'keyz'."
    )
    assert found.value.difference.splitlines()[2:] == [
        *("@@ -1,2 +1,2 @@", " operation 1 note", "-state 1 set keys", "+state 1 set keyz")
    ]


def passing(value: Any, *, child: bool = False) -> Any:
    """Return code that passes a value to a task or to a child."""
    app = Orchestrator()
    app.task(name="fetch")(lambda value: value)

    @app.workflow(name="inner")
    async def inner(ctx: WorkflowContext, value: Any) -> Any:
        return value

    @app.workflow(name="passes")
    async def passes(ctx: WorkflowContext) -> Any:
        await ctx.sleep(1)
        return await ctx.schedule("inner" if child else "fetch", value)

    return passes


def passed(value: Any, *, child: bool = False) -> Recording:
    async def look(run: TestedRun[Any], _: WorkflowTest) -> Recording:
        await run.result()
        return run.history

    return started(passing(value, child=child), look, mocks={"fetch": None})


@pytest.mark.parametrize("child", [False, True])
def test_replay_detects_different_arguments(child: bool) -> None:
    what = "child 1 inner" if child else "task 1 fetch"
    with pytest.raises(DeterminismViolation) as found:
        replay(passing({"amount": 2}, child=child), passed({"amount": 1}, child=child))
    assert str(found.value).startswith(f"Arguments mismatch at {what} (event 6): the code passes different arguments")
    assert found.value.difference.splitlines()[-2:] == [f"-{what}", f"+{what}, with different arguments"]


def test_the_order_of_sets_and_mappings_is_ignored() -> None:
    replay(passing({"a": 1, "b": {"x", "y"}}), passed({"b": {"y", "x"}, "a": 1}))
    replay(passing({1: "a"}), passed({1: "b"}))  # keys that are no strings have no order: not compared


def test_histories_without_argument_digests_still_replay() -> None:
    old = [
        Event(event.number, event.at, msgspec.structs.replace(event.what, digest=""))
        if isinstance(event.what, history.TaskScheduled)
        else event
        for event in passed(1).events
    ]
    replay(passing(2), Recording(passed(1).run_id, old))
    packed = msgspec.msgpack.encode(history.TaskScheduled(1, b"1" * 16, "fetch"))[:-1]  # as an older release wrote it
    short = bytes([packed[0] - 1]) + packed[1:]
    assert msgspec.msgpack.decode(short, type=history.TaskScheduled).digest == ""


def test_replay_detects_code_that_ends_differently_or_never() -> None:
    async def fails(ctx: WorkflowContext, keys: list[str], blob: bytes) -> None:
        raise WorkflowFailed("no")

    async def waits(ctx: WorkflowContext, keys: list[str], blob: bytes) -> None:
        await ctx.promise("more")

    with pytest.raises(DeterminismViolation, match="the history continues here, but the code raises .*: no"):
        replay(changed(fails), recording())
    with pytest.raises(DeterminismViolation, match="RunCompleted and the code still waits for <Promise 'more'>"):
        replay(changed(waits), recording())


def test_an_open_history_is_replayed_up_to_its_last_event() -> None:
    whole = recording()
    part = Recording(whole.run_id, whole.events[:5])
    assert isinstance(replay(reads, part)[-1], commands.ScheduleTask)


def test_a_workflow_test_detects_nondeterministic_code() -> None:
    app = Orchestrator()
    fetch = app.task(name="fetch")(lambda key: key)
    other = app.task(name="other")(lambda key: key)
    plays: list[int] = []

    @app.workflow(name="moody")
    async def moody(ctx: WorkflowContext) -> None:
        plays.append(1)
        await (fetch if len(plays) == 1 else other).schedule("x")

    async def play(run: TestedRun[Any], _: WorkflowTest) -> None:
        with pytest.raises(DeterminismViolation, match="'fetch' and the code says 'other'"):
            await run.result()

    started(moody, play, mocks={fetch: None})


def test_a_failed_run_shows_its_traceback() -> None:
    app = Orchestrator()

    @app.workflow(name="breaks")
    async def breaks(ctx: WorkflowContext) -> None:
        raise ValueError("here")

    async def play(run: TestedRun[Any], _: WorkflowTest) -> None:
        with pytest.raises(RunFailed, match='ValueError: here(.|\n)*in breaks\n.*raise ValueError\\("here"\\)'):
            await run.result()

    started(breaks, play)
