"""Signals and updates with ids: duplicates are applied once; updates have stages, and stored answers."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from orchestrator import (
    Duplicate,
    HandlerFailed,
    InvalidArguments,
    InvalidWorkflow,
    NotFound,
    Orchestrator,
    ResultTimeout,
    UnknownHandler,
    UpdateHandle,
    UpdateRefused,
    WorkflowContext,
    WorkflowHandle,
    WrongState,
    workflow,
)
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.code.starting import Starting
from orchestrator.settings import load_settings
from tests.integration.code_stage import kinds, rest, turn
from tests.integration.serving import serving
from tests.integration.stage import System, Worker
from tests.waiting import eventually


@pytest.fixture
def counter(system: System) -> Any:
    @system.app.workflow(name="counter")
    class Counter:
        most = 10

        def __init__(self, ctx: WorkflowContext) -> None:
            self.ctx, self.count, self.heard = ctx, 0, list[int]()

        @workflow.run
        async def run(self) -> list[int]:
            await self.ctx.wait_condition(lambda: -1 in self.heard)
            return [*self.heard, self.count]

        @workflow.signal
        def push(self, number: int) -> None:
            self.heard.append(number)

        @workflow.signal
        def reset(self, number: int) -> None:
            self.count = number

        @workflow.signal
        def halt(self) -> None: ...

        @workflow.update
        def drop(self) -> None:
            self.count = 0

        @workflow.update
        async def add(self, number: int) -> int:
            await self.ctx.wait_condition(lambda: self.heard)
            self.count += 10 // number
            return self.count

        @add.validator
        def check(self, number: int) -> None:
            if number > self.most:
                raise ValueError("too much")

    return Counter


@pytest.fixture
def worker(system: System) -> Worker:
    return system.worker(knows=("job", "counter"))


def test_updates_with_ids_are_applied_once_and_their_answers_stay(
    system: System, counter: Any, worker: Worker, engine_: Engine
) -> None:
    handle: WorkflowHandle[list[int]] = counter.run.start()
    rest(system, worker, engine_)
    first: UpdateHandle[int] = handle.options(id="request-7").start_update(counter.add, 5)
    assert (first.id, first.stage()) == ("request-7", "sent")
    handle.options(id="request-7").start_update(counter.add, 5)  # in the same tick
    rest(system, worker, engine_)
    assert first.stage() == "accepted"
    handle.options(id="request-7").start_update(counter.add, 5)
    rest(system, worker, engine_)

    handle.signal(counter.push, 1)
    rest(system, worker, engine_)
    assert (first.stage(), first.result()) == ("completed", 2)
    assert handle.options(id="request-7").update(counter.add, 5) == 2
    assert kinds(system, handle).count("update_requested") == 1

    handle.signal(counter.push, -1)
    rest(system, worker, engine_)
    assert handle.result(0) == [1, -1, 2]
    system.sql("DELETE FROM orchestrator.answers RETURNING 1")  # as after an hour
    assert handle.update_handle("request-7", counter.add).result() == 2
    assert handle.options(id="request-7").update(counter.add, 5) == 2
    with pytest.raises(WrongState, match="it is in state 'success'"):
        handle.options(id="request-8").update(counter.add, 5)


def test_validators_of_updates_run_once(system: System, counter: Any, worker: Worker, engine_: Engine) -> None:
    handle = counter.run.start()
    rest(system, worker, engine_)
    sent = [handle.start_update(counter.add, number) for number in (5, 20)]
    rest(system, worker, engine_)
    assert [update.stage() for update in sent] == ["accepted", "completed"]
    for most in (1, 100):  # another release
        engine_.close()
        counter.most = most
        handle.signal(counter.push, 1)
        rest(system, worker, engine_)
        assert sent[0].result() == 2
        with pytest.raises(UpdateRefused, match="too much"):
            sent[1].result()
    engine_.close()
    handle.signal(counter.push, -1)
    rest(system, worker, engine_)
    assert handle.result(0) == [1, 1, -1, 2]


def test_a_rejected_update_may_be_sent_again_with_its_id(
    system: System, counter: Any, worker: Worker, engine_: Engine
) -> None:
    handle = counter.run.start()
    handle.signal(counter.push, 1)
    rest(system, worker, engine_)
    with serving(system.app.settings) as url, Orchestrator(load_settings(environ={}), api_url=url) as app:
        for by in (handle, app.workflow_run(handle.id)):
            sent = by.options(id="m-1").start_update(counter.add, 20)
            assert sent.stage() == "sent"
            rest(system, worker, engine_)
            assert sent.stage() == "completed"
            with pytest.raises(UpdateRefused, match="too much"):
                sent.result()
    counter.most = 100
    sent = handle.options(id="m-1").start_update(counter.add, 5)
    assert sent.stage() == "sent"
    handle.options(id="m-1").start_update(counter.add, 5)  # duplicate, on its way
    rest(system, worker, engine_)
    assert (sent.stage(), sent.result()) == ("completed", 2)
    assert handle.options(id="m-1").update(counter.add, 5) == 2
    assert handle.update_handle("m-1", counter.add).result() == 2
    assert kinds(system, handle).count("update_requested") == 3
    with pytest.raises(Duplicate, match="update 'add' was sent to this run under the same id"):
        handle.options(id="m-1").update(counter.drop)
    engine_.close()  # replay gives the same
    handle.signal(counter.push, -1)
    rest(system, worker, engine_)
    assert handle.result(0) == [1, -1, 2]


def test_a_start_with_a_rejected_update_may_be_repeated(
    system: System, counter: Any, worker: Worker, engine_: Engine
) -> None:
    def execute() -> int:
        with ThreadPoolExecutor() as pool:
            sending = counter.run.starting(id="c-1", update=(counter.add, 20), update_id="m-1", signal=None)
            answer = pool.submit(sending.execute)
            eventually(lambda: rest(system, worker, engine_) or answer.done())
            return int(answer.result())

    with pytest.raises(UpdateRefused, match="too much"):
        execute()
    handle = counter.run.find("c-1")
    handle.signal(counter.push, 1)
    with pytest.raises(UpdateRefused, match="too much"):
        execute()
    counter.most = 100
    assert [execute(), execute()] == [0, 0]
    assert kinds(system, handle).count("update_requested") == 3


def test_a_message_id_cannot_be_reused_for_another_handler(
    system: System, counter: Any, worker: Worker, engine_: Engine
) -> None:
    handle = counter.run.start()
    handle.options(id="m-1").signal(counter.push, 1)
    sent = handle.options(id="m-1").start_update(counter.add, 5)
    rest(system, worker, engine_)
    assert sent.result() == 2
    handle.options(id="m-1").signal(counter.push, 1)
    with pytest.raises(Duplicate, match="signal 'push' was sent to this run under the same id"):
        handle.options(id="m-1").signal(counter.reset, 1)
    with pytest.raises(Duplicate, match="update 'add' was sent to this run under the same id"):
        handle.options(id="m-1").update(counter.drop)
    assert handle.options(id="m-1").update(counter.add, 5) == 2


def test_errors_of_an_update_found_by_its_id_name_the_update(
    system: System, counter: Any, worker: Worker, engine_: Engine
) -> None:
    handle = counter.run.start()
    handle.options(id="big").start_update(counter.add, 11)
    with pytest.raises(ResultTimeout):
        handle.update_handle("big").result(0.01)
    rest(system, worker, engine_)
    with pytest.raises(UpdateRefused, match="The update 'add' failed: ValueError: too much"):
        handle.update_handle("big", counter.add).result()
    with pytest.raises(NotFound, match="No update was sent to run .* under this id"):
        handle.update_handle("never-sent").result(0.01)
    with pytest.raises(NotFound, match="No update was sent to run .* under this id"):
        handle.update_handle("never-sent").stage()


def test_arguments_of_a_starting_signal_are_checked(system: System, counter: Any) -> None:
    with pytest.raises(InvalidArguments, match="argument 'number'"):
        counter.run.starting(id="c-2", signal=(counter.push, "much")).start()
    with pytest.raises(InvalidArguments):
        counter.run.starting(id="c-2", signal=(counter.push,)).start()
    assert not system.sql("SELECT 1 FROM orchestrator.runs")
    counter.run.starting(id="c-2", signal=(counter.push, 1)).start()
    counter.run.starting(id="c-3", signal=(counter.halt, None)).start()


def test_each_update_failure_has_its_own_error_type(
    system: System, counter: Any, worker: Worker, engine_: Engine
) -> None:
    handle = counter.run.start()
    handle.signal(counter.push, 1)
    rest(system, worker, engine_)
    sent = [handle.start_update("add", number) for number in (11, "much", 0)]
    rest(system, worker, engine_)
    for update, kind in zip(sent, (UpdateRefused, InvalidArguments, HandlerFailed), strict=True):
        with pytest.raises(kind):
            update.result()


def test_signals_with_ids_are_applied_once_and_in_order(
    system: System, counter: Any, worker: Worker, engine_: Engine
) -> None:
    handle = counter.run.start()
    for number in (1, 1, 2):
        handle.options(id=f"signal-{number}").signal(counter.push, number)
    turn(system, worker, engine_)
    for number in (2, 3, 3, 4):
        handle.options(id=f"signal-{number}").signal(counter.push, number)
    for number in (5, 6, 7, -1):
        handle.signal(counter.push, number)
    rest(system, worker, engine_)
    assert handle.result(0) == [1, 2, 3, 4, 5, 6, 7, -1, 0]


def test_an_update_starts_a_run_or_reaches_the_open_run(
    system: System, counter: Any, worker: Worker, engine_: Engine
) -> None:
    handles = []
    for number in (5, 2):
        for _ in range(2):  # the second is a duplicate
            starting = counter.run.starting(id="c-1", update=(counter.add, number), update_id=f"request-{number}")
            handles.append(starting.start())
        rest(system, worker, engine_)
    assert len({handle.id for handle in handles}) == 1
    handle = handles[0]
    for number in (1, -1):
        handle.signal(counter.push, number)
        rest(system, worker, engine_)
    assert [handle.update_handle(f"request-{number}").result() for number in (5, 2)] == [2, 7]
    assert handle.result(0) == [1, -1, 7]
    assert kinds(system, handle).count("update_requested") == 2

    anew = counter.run.starting(id="c-1", update=("add", 1), update_id="request-9").start()
    assert anew.id != handle.id
    with pytest.raises(InvalidWorkflow, match="give id= as well"):
        counter.run.starting(update=("add", 1))
    with pytest.raises(InvalidWorkflow, match="give update_id= as well"):
        counter.run.starting(id="c-1", update=("add", 1)).start()
    with pytest.raises(InvalidWorkflow, match="give starting.* an update="):
        counter.run.starting(id="c-1").execute()


def test_an_update_with_start_is_executed_in_one_call(
    system: System, counter: Any, worker: Worker, engine_: Engine
) -> None:
    first = counter.run.starting(id="c-1", update=(counter.add, 5), update_id="request-1")
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(first.execute)]
        eventually(lambda: system.sql("SELECT 1 FROM orchestrator.runs"))
        again = counter.run.starting(id="c-1", update=("add", 2))
        answers += [pool.submit(first.execute), pool.submit(again.execute), pool.submit(again.execute)]
        handle = counter.run.find("c-1")
        handle.signal(counter.push, 1)
        eventually(lambda: rest(system, worker, engine_) or all(one.done() for one in answers))
    assert sorted(one.result() for one in answers) == [2, 2, 7, 12]  # duplicates do not count
    assert kinds(system, handle).count("update_requested") == 3


def test_handlers_of_other_classes_are_rejected_before_sending(system: System, counter: Any) -> None:
    @system.app.workflow(name="other")
    class Other:
        def __init__(self, ctx: WorkflowContext) -> None: ...

        @workflow.run
        async def run(self) -> None: ...

        @workflow.signal
        def push(self, number: int) -> None: ...

        @workflow.query
        def total(self) -> int:
            return 0

        @workflow.update
        def add(self, number: int) -> int:
            return number

    @system.app.workflow(name="plain")
    async def plain(ctx: WorkflowContext) -> None: ...

    handle, other = counter.run.start(), Other.run.start()
    for send in (
        lambda: handle.signal(Other.push, 1),
        lambda: handle.options(id="m-1").signal(Other.push, 1),
        lambda: handle.query(Other.total),
        lambda: handle.update(Other.add, 1),
        lambda: handle.start_update(Other.add, 1),
        lambda: system.app.workflow_run(handle.id, counter.run).update(Other.add, 1),
        lambda: counter.run.starting(id="c-1", signal=(Other.push, 1)).start(),
        lambda: counter.run.starting(id="c-1", update=(Other.add, 1)).execute(),
        lambda: counter.run.signal_many(Other.push, [(handle, 1)]),
        lambda: plain.start().signal(Other.push, 1),  # type: ignore[call-overload]
    ):
        with pytest.raises(UnknownHandler, match=r"has no <\w+ .*Other\.\w+>.*Nothing was sent"):
            send()
    with pytest.raises(
        UnknownHandler, match="Expected a signal given by its name or its method, found <query .*Other.total>"
    ):
        other.signal(Other.total)  # type: ignore[call-overload]
    assert system.sql("SELECT 1 FROM orchestrator.inbox") == []
    assert counter.run.signal_many(counter.push, [(handle, 1)]) == []
    assert len(system.sql("SELECT 1 FROM orchestrator.inbox")) == 1
    with pytest.raises(InvalidArguments, match="Nothing was sent"):
        counter.run.signal_many(counter.push, [(handle, "one")])


def test_a_starting_update_is_applied_once_even_after_its_run_ended(
    system: System, worker: Worker, engine_: Engine
) -> None:
    @system.app.workflow(name="counter")
    class Pay:
        def __init__(self, ctx: WorkflowContext) -> None:
            self.ctx, self.paid = ctx, 0

        @workflow.run
        async def run(self, continues: int = 0) -> int:
            await self.ctx.wait_condition(lambda: self.paid or continues < 0)
            if continues > 0:
                self.ctx.continue_as_new(-1)
            return self.paid

        @workflow.update
        def pay(self, amount: int) -> int:
            self.paid += amount
            return self.paid

        @workflow.update
        def refund(self, amount: int) -> int:
            return amount

    def paying(id: str, continues: int = 0, update: Any = Pay.pay) -> WorkflowHandle[int]:
        starting = Pay.run.starting(id=id, update=(update, 10), update_id="payment-7")
        handle = starting.start(continues)
        rest(system, worker, engine_)
        return handle

    first = paying("p-1")
    assert first.status() == "success"
    assert paying("p-1") == first
    assert paying("p-1").update_handle("payment-7", Pay.pay).result() == 10
    with pytest.raises(Duplicate, match="update 'pay' was sent to this run under the same id"):
        paying("p-1", update=Pay.refund)
    continued = paying("p-2", 1)
    assert continued.status() == "success"
    assert Pay.run.find("p-2") != continued
    assert paying("p-2", 1) == continued
    assert system.count("runs") == 3

    for options in ({"update": (Pay.pay, 10), "update_id": "payment-7"}, {"signal": ("push", 1)}):
        for policy in ("reject", "return", "anew"):
            with pytest.raises(
                InvalidWorkflow, match="Option on_conflict: it cannot be combined with signal= or update="
            ):
                Pay.run.starting(id="p-1", on_conflict=policy, **options)


def test_an_update_of_a_terminated_run_is_rejected_at_once(
    system: System, counter: Any, worker: Worker, engine_: Engine
) -> None:
    handle = counter.run.start()
    sent = handle.options(id="open").start_update(counter.add, 5)
    rest(system, worker, engine_)
    handle.terminate()
    rest(system, worker, engine_)
    for _ in range(2):
        begun = time.monotonic()
        with pytest.raises(WrongState, match="it is in state 'terminated'"):
            sent.result()
        assert time.monotonic() - begun < 4
    with pytest.raises(NotFound, match="No update was sent"):
        handle.update_handle("never-sent").result()


def test_the_stage_of_an_update_says_how_its_run_ended(
    system: System, counter: Any, worker: Worker, engine_: Engine
) -> None:
    handles = [counter.run.start(), counter.run.start()]
    terminated, cancelled = [handle.start_update(counter.add, 5) for handle in handles]
    rest(system, worker, engine_)
    assert [one.stage() for one in (terminated, cancelled)] == ["accepted"] * 2
    handles[0].terminate()
    handles[1].cancel()
    rest(system, worker, engine_)
    assert terminated.stage() == "run terminated"
    assert cancelled.stage() == "completed", "its code has answered"
    with pytest.raises(WrongState, match="The run ended before update 'add' was completed"):
        cancelled.result()


def test_a_waiting_update_is_notified_of_the_end_of_its_run(
    system: System, counter: Any, worker: Worker, engine_: Engine
) -> None:
    handle = counter.run.start()
    sent = handle.start_update(counter.add, 5)
    rest(system, worker, engine_)
    with ThreadPoolExecutor() as pool:
        begun = time.monotonic()
        waiting = pool.submit(sent.result)
        handle.terminate()
        rest(system, worker, engine_)
        with pytest.raises(WrongState, match="it is in state 'terminated'"):
            waiting.result()
        assert time.monotonic() - begun < 4


def test_an_unknown_update_of_a_class_is_rejected_at_once(
    system: System, counter: Any, worker: Worker, engine_: Engine
) -> None:
    handle = counter.run.start()
    rest(system, worker, engine_)
    sent = handle.start_update("ad", 5)
    rest(system, worker, engine_)
    with pytest.raises(UnknownHandler, match=r"no update 'ad'. Did you mean 'add'\? It answers: add, drop"):
        sent.result(0.01)
    engine_.close()  # replay keeps the rejection
    handle.signal(counter.push, -1)
    rest(system, worker, engine_)
    assert handle.result(0) == [-1, 0]


def test_messages_with_ids_are_applied_once_over_http(
    system: System, counter: Any, worker: Worker, engine_: Engine
) -> None:
    handle = counter.run.start()
    with serving(system.app.settings) as url, Orchestrator(load_settings(environ={}), api_url=url) as app:
        away = app.workflow_run(handle.id)
        for _ in range(2):
            away.options(id="signal-1").signal(counter.push, 1)
        first = away.options(id="request-7").start_update(counter.add, 5)
        assert first.stage() == "sent"
        rest(system, worker, engine_)
        assert (first.stage(), first.result()) == ("completed", 2)
        assert away.options(id="request-7").update(counter.add, 5) == 2
        assert away.state() == {}
    handle.signal(counter.push, -1)
    rest(system, worker, engine_)
    assert handle.result(0) == [1, -1, 2]


@pytest.mark.parametrize("ends", [1, 5])
def test_a_starting_update_begins_a_run_if_the_open_run_ends(
    system: System, counter: Any, worker: Worker, engine_: Engine, monkeypatch: pytest.MonkeyPatch, ends: int
) -> None:
    open_run = counter.run.starting(id="c-1").start()
    rest(system, worker, engine_)
    start, started = Starting.start, list[WorkflowHandle[Any]]()

    def start_and_end(self: Any, *args: Any) -> Any:
        if len(started) < ends:
            counter.run.find("c-1").signal(counter.push, -1)
            system.pass_seconds()
        started.append(start(self, *args))
        if len(started) <= ends:
            _end_first(system, worker, engine_)
            if ends > 1:
                start(counter.run.starting(id="c-1", on_conflict="anew"))
        else:
            started[-1].signal(counter.push, 1)
        rest(system, worker, engine_)
        return started[-1]

    monkeypatch.setattr(Starting, "start", start_and_end)
    update = counter.run.starting(id="c-1", update=(counter.add, 5), update_id="u-1")
    if ends == 1:
        assert update.execute() == 2
        assert [one.id == open_run.id for one in started] == [True, False]
        return
    with pytest.raises(WrongState, match="5 runs in a row under id 'c-1' ended before update 'add' reached them"):
        update.execute()


def test_an_update_after_the_end_of_a_run_is_rejected(
    system: System, counter: Any, worker: Worker, engine_: Engine
) -> None:
    run = counter.run.start()
    rest(system, worker, engine_)
    run.signal(counter.push, -1)
    system.pass_seconds()
    update = run.options(id="u-1").start_update(counter.add, 5)
    _end_first(system, worker, engine_)
    assert update.stage() == "run success"
    with pytest.raises(WrongState, match="ended before update 'add' reached it: send the update to an open run"):
        update.result(timeout=1)  # answered without polling
    with pytest.raises(WrongState, match="ended before update 'add' reached it"):
        run.options(id="u-1").update(counter.add, 5)
    with pytest.raises(NotFound, match="No update was sent"):
        run.update_handle("u-2").stage()


def _end_first(system: System, worker: Worker, engine: Engine) -> None:
    """End the open run before the pending update is applied."""
    (update,) = system.sql("DELETE FROM orchestrator.inbox WHERE kind = 'update' RETURNING *")
    rest(system, worker, engine)
    system.sql(
        "INSERT INTO orchestrator.inbox (kind, target, body) VALUES ('update', :target, CAST(:body AS jsonb)) "
        "RETURNING 1",
        target=update["target"],
        body=json.dumps(update["body"]),
    )
    rest(system, worker, engine)
