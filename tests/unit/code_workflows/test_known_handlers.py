"""Updates and signals that a workflow handles are read from its code; misspelled names are rejected before sending."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from tokenize import TokenError
from typing import Any
from unittest.mock import Mock

import pytest

from orchestrator import InvalidTask, Orchestrator, Settings, UnknownHandler, WorkflowContext, workflow
from orchestrator.sdk.code.handle import WorkflowHandle
from orchestrator.sdk.code.known_handlers import signal_names, update_names
from orchestrator.sdk.code.workflow_class import function_of
from orchestrator.testing import TestedRun, WorkflowTest
from tests.unit.code_workflows.playing import started


async def of_all_forms(ctx: WorkflowContext, limit: int) -> None:
    def affordable(value: int) -> None: ...

    @ctx.update
    def plain() -> None: ...

    @ctx.update(validate=affordable)
    async def checked(value: int) -> None:
        @ctx.update("later")
        def inner() -> None: ...

        await ctx.sleep(limit)

    ctx.update("by_hand")(affordable)
    ctx.query(plain)


async def without_handlers(ctx: WorkflowContext) -> None:
    await ctx.sleep(5)


async def handed_on(ctx: WorkflowContext) -> None:
    register(ctx)


async def by_value(ctx: WorkflowContext, function: Callable[[], None]) -> None:
    ctx.update(function)


async def made_up(ctx: WorkflowContext) -> None:
    for name in ("a", "b"):
        ctx.update(name)(lambda: None)


async def kept(ctx: WorkflowContext) -> None:
    update = ctx.update
    update("a")(lambda: None)


async def reflected(ctx: WorkflowContext) -> None:
    register(locals())


def register(what: Any) -> None: ...


@functools.wraps(without_handlers)
async def wrapped(ctx: WorkflowContext) -> None:
    register(ctx)


def test_update_names_are_read_from_the_code() -> None:
    assert update_names(of_all_forms) == frozenset({"plain", "checked", "later", "by_hand"})
    assert update_names(without_handlers) == frozenset()


@pytest.mark.parametrize("function", [handed_on, by_value, made_up, kept, reflected, wrapped])
def test_update_names_are_unknown_if_the_code_may_register_more(function: Callable[..., Any]) -> None:
    assert update_names(function) is None


def test_update_names_are_unknown_without_source_code() -> None:
    found: dict[str, Any] = {}
    exec("async def nowhere(ctx): await ctx.sleep(1)", found)
    assert update_names(found["nowhere"]) is None


def test_a_misspelled_update_is_rejected_before_it_is_sent() -> None:
    app = Orchestrator(Settings())  # has neither Postgres nor Redis
    order = app.workflow(name="order")(of_all_forms)
    handle: WorkflowHandle[Any] = WorkflowHandle(app._client, bytes(16), order._signature)
    with pytest.raises(InvalidTask, match=r"answers no update 'chekced'\. Did you mean 'checked'\? It answers: "):
        handle.update("chekced", 5)

    app.workflow(name="order", version=2)(without_handlers)
    with pytest.raises(InvalidTask, match="It answers: by_hand, checked, later, plain"):
        handle.update("chekced", 5)
    app.workflow(name="order", version=3)(handed_on)
    with pytest.raises(Exception, match="_url is not set"):
        handle.update("chekced", 5)


def test_a_workflow_test_rejects_a_misspelled_update() -> None:
    async def play(run: TestedRun[None], _: WorkflowTest) -> None:
        with pytest.raises(InvalidTask, match="answers no update 'chekced'"):
            await run.update("chekced", 5)

    started(Orchestrator(Settings()).workflow(name="order")(of_all_forms), play, 5)


class Closed:
    def __init__(self, ctx: WorkflowContext) -> None:
        self.ctx, self.paid = ctx, 0

    @workflow.run
    async def run(self) -> int:
        await self.ctx.wait_condition(lambda: self.paid)
        return self.paid

    @workflow.signal
    def pay(self, amount: int) -> None:
        self.paid = amount

    @workflow.query
    def total(self) -> int:
        return self.paid


@dataclass
class AsData:
    context: WorkflowContext

    @workflow.run
    async def run(self) -> None:
        await self.context.sleep(1)


class Inherits(AsData):
    @workflow.signal
    def more(self) -> None: ...


class Asks(Closed):
    async def wait(self) -> Any:
        return await self.ctx.signals("news").get()


class HandsOn(Closed):
    def begin(self) -> None:
        register(self.ctx)


class HandsItselfOn(Closed):
    def begin(self) -> None:
        register(self)


class AtOnce(Closed):
    def __init__(self, ctx: WorkflowContext) -> None:
        super().__init__(ctx)


def signals_of(kind: type) -> frozenset[str] | None:
    return signal_names(function_of(kind))


def test_a_class_handles_only_the_signals_of_its_methods() -> None:
    assert signals_of(Closed) == frozenset({"pay"})
    assert signals_of(AsData) == frozenset()
    assert signals_of(Inherits) == frozenset({"more"})


@pytest.mark.parametrize("kind", [Asks, HandsOn, HandsItselfOn, AtOnce])
def test_a_class_that_uses_or_passes_on_its_context_may_handle_any_signal(kind: type) -> None:
    assert signals_of(kind) is None
    assert signal_names(without_handlers) is None


def test_a_class_without_readable_source_may_handle_any_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (OSError(), TokenError(), UnicodeDecodeError("utf-8", b"", 0, 1, "")):
        monkeypatch.setattr(inspect, "getsource", Mock(side_effect=error))
        assert signals_of(Closed) is None


def test_a_misspelled_signal_is_rejected_before_it_is_sent() -> None:
    app = Orchestrator(Settings())  # has neither Postgres nor Redis
    app.workflow(name="closed")(Closed)
    order = Closed.run
    handle: WorkflowHandle[Any] = WorkflowHandle(app._client, bytes(16), order._signature)
    said = r"'closed' has no handler for signal 'pya'\. Did you mean 'pay'\? It handles: pay\. Nothing was sent"
    with pytest.raises(UnknownHandler, match=r"has no handler for signal 'total'\. It handles: pay"):
        handle.signal("total")
    for send in (
        lambda: handle.signal("pya", 5),
        lambda: order.signal_many("pya", [(handle, 5)]),
        lambda: order.starting(id="o-1", signal=("pya", 5)).start(),
    ):
        with pytest.raises(UnknownHandler, match=said):
            send()
    app.workflow(name="closed", version=2)(without_handlers)
    with pytest.raises(Exception, match="_url is not set"):
        handle.signal("pya", 5)


def test_a_workflow_test_rejects_a_misspelled_signal() -> None:
    async def play(run: TestedRun[int], _: WorkflowTest) -> None:
        with pytest.raises(UnknownHandler, match="has no handler for signal 'pya'"):
            await run.signal("pya", 5)
        await run.signal("pay", 5)

    app = Orchestrator(Settings())
    app.workflow(name="closed")(Closed)
    started(Closed.run, play)
