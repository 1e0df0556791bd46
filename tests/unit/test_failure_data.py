"""Attributes of an exception travel with it as plain data, beside its text."""

from __future__ import annotations

import asyncio
import datetime
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest

from orchestrator import GiveUp, OperationFailed, Orchestrator, RunFailed, TaskFailed, WorkflowContext, WorkflowFailed
from orchestrator.sdk.tasks.failure import describe
from orchestrator.testing import Recording, TestedRun, WorkflowTest


@dataclass
class Card:
    number: str
    valid: datetime.date


class Declined(Exception):
    def __init__(self, code: int, **more: Any) -> None:
        super().__init__(f"declined with code {code}")
        self.code = code
        self._secret = "not shown"
        vars(self).update(more)


class Odd(Exception):
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no attributes here")


class Slotted(Exception):
    __slots__ = ("_hidden", "code", "unset")

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
        self._hidden = 1


CARD = Card("4711", datetime.date(2030, 1, 1))


@pytest.mark.parametrize(
    ("error", "data"),
    [
        (ValueError("plain"), {}),
        (Declined(51), {"code": 51}),
        (Declined(51, card=CARD), {"code": 51, "card": {"number": "4711", "valid": "2030-01-01"}}),
        (Declined(51, amount=Decimal("9.90"), raw=b"\0\1"), {"code": 51, "amount": "9.90", "raw": "AAE="}),
        (Declined(51, response=object()), {"code": 51}),
        (Declined(51, text="\ud800"), {"code": 51}),
        (Declined(51, text="\0"), {"code": 51, "text": "\0"}),
        (Declined(51, large="x" * 100_000, small=1), {"code": 51, "small": 1}),
        (WorkflowFailed("no", data={"missing": 3}), {"missing": 3}),
        (GiveUp("no", data={"code": 7}), {"code": 7}),
        (WorkflowFailed("no"), {}),
        (TaskFailed("it failed", kind="shop.Declined", traceback="…", data={"code": 51}), {"code": 51}),
        (Odd("odd"), {}),
        (Slotted(7), {"code": 7}),
        (FileNotFoundError(2, "No such file", "a.txt"), {"errno": 2, "strerror": "No such file", "filename": "a.txt"}),
        (OSError("no"), {}),
        (AttributeError("no", name="size", obj=CARD), {"name": "size"}),
        (SystemExit(3), {"code": 3}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exception_attributes_become_data(error: Exception, data: dict[str, Any]) -> None:
    assert describe(error).attributes == data


def test_too_deeply_nested_attributes_are_omitted() -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    assert describe(Declined(1, nested=nested)).attributes == {"code": 1}


app = Orchestrator()


@app.task(name="charge")
def charge(order: str) -> str: ...


@app.workflow(name="pay")
async def pay(ctx: WorkflowContext, order: str) -> str:
    return await charge.schedule(order)


@app.workflow(name="buy")
async def buy(ctx: WorkflowContext, order: str) -> Any:
    found: list[Any] = []
    try:
        await charge.schedule(order)
    except TaskFailed as error:
        found.append((error.kind.rpartition(".")[2], error.data))
    try:
        await pay.schedule(order)
    except RunFailed as error:
        found.append((error.kind.rpartition(".")[2], error.data))

    def look() -> None:
        raise Declined(53)

    try:
        await ctx.run("look", look)
    except OperationFailed as error:
        found.append((error.kind.rpartition(".")[2], error.data))
    raise WorkflowFailed("not sold", data={"found": found})


def test_error_data_reaches_the_caller_through_tasks_and_workflows() -> None:
    async def play() -> tuple[RunFailed, Recording]:
        async with WorkflowTest() as test:
            run: TestedRun[Any] = await test.start(buy, "o-1", mocks={charge: Declined(51, card=CARD)})
            with pytest.raises(RunFailed) as failed:
                await run.result()
            return failed.value, run.history

    error, recording = asyncio.run(play())
    data = {"code": 51, "card": {"number": "4711", "valid": "2030-01-01"}}
    assert error.kind == "orchestrator.errors.WorkflowFailed"
    assert error.data == {"found": [["Declined", data], ["TaskFailed", data], ["Declined", {"code": 53}]]}
    assert Recording.from_json(recording.to_json()) == recording
