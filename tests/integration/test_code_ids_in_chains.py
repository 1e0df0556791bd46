"""Message ids in runs that continue or repeat other runs: messages applied there are not applied again."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest

from orchestrator import HandlerFailed, InvalidArguments, Orchestrator, WorkflowContext, WorkflowHandle, workflow
from orchestrator.api.app import create_app
from orchestrator.sdk.code.engine import Engine
from orchestrator.settings import load_settings
from orchestrator.store.code import runs
from tests.integration.code_stage import rest
from tests.integration.serving import serving
from tests.integration.stage import System, raw
from tests.waiting import eventually

END, CONTINUE = -1, -2


class Bank:
    """Accounts that count messages, as runs alone or as children."""

    def __init__(self, system: System, engine: Engine) -> None:
        self.system, self.engine = system, engine
        self.worker = system.worker(knows=("account", "parent"))

        @system.app.workflow(name="account")
        class Account:
            def __init__(self, ctx: WorkflowContext) -> None:
                self.ctx, self.paid, self.heard = ctx, 0, list[int]()

            @workflow.run
            async def run(self, carried: tuple[int, list[int]] | None = None) -> tuple[int, list[int]]:
                self.paid, self.heard = carried or (self.paid, self.heard)
                await self.ctx.wait_condition(lambda: bool(self.heard and self.heard[-1] < 0))
                if self.heard[-1] == CONTINUE:
                    self.ctx.continue_as_new((self.paid, self.heard[:-1]))
                return self.paid, self.heard[:-1]

            @workflow.signal
            def push(self, number: int) -> None:
                self.heard.append(number)

            @workflow.update
            def pay(self, amount: int) -> int:
                if Bank.closed:
                    raise ValueError("closed")
                self.paid += amount
                return self.paid

        @system.app.workflow(name="parent")
        async def parent(ctx: WorkflowContext) -> Any:
            return await Account.run.options(close_policy="abandon").schedule()

        self.account: Any = Account
        self.parent = parent

    closed = False

    def rest(self) -> None:
        rest(self.system, self.worker, self.engine)

    def open(self, *, child: bool) -> WorkflowHandle[Any]:
        if not child:
            handle: WorkflowHandle[Any] = self.account.run.starting(id="a-1").start()
            self.rest()
            return handle
        self.parent.start()
        self.rest()
        (row,) = self.system.sql("SELECT id::text FROM orchestrator.runs WHERE workflow = 'account'")
        return self.system.app.workflow_run(row["id"], self.account.run)

    def signal(self, handle: WorkflowHandle[Any], number: int, id: str | None = None) -> None:
        handle.options(id=id).signal(self.account.push, number)
        self.rest()

    def pay(self, handle: WorkflowHandle[Any], amount: int, id: str) -> int:
        sent = handle.options(id=id).start_update(self.account.pay, amount)
        self.rest()
        assert sent.stage() == handle.update_handle(id).stage() == "completed"
        paid: int = sent.result(0.1)
        return paid

    def reset(self, handle: WorkflowHandle[Any], to: int) -> WorkflowHandle[Any]:
        with ThreadPoolExecutor() as pool:
            resetting = pool.submit(lambda: handle.reset(to=to))
            eventually(lambda: self.system.pass_seconds() or resetting.done())
        self.rest()
        return resetting.result()

    def forget_answers(self) -> None:
        """Let the answers to updates expire; answers to signals are kept for an hour, too."""
        self.system.sql("DELETE FROM orchestrator.answers WHERE result <> '\\xa470757368' RETURNING 1")

    def newest(self, handle: WorkflowHandle[Any]) -> WorkflowHandle[Any]:
        with self.system.engine.connect() as connection:
            last = runs.latest(connection, [raw(handle)])[raw(handle)]
        return self.system.app.workflow_run(str(UUID(bytes=last)), self.account.run)


@pytest.fixture
def bank(system: System, engine_: Engine, monkeypatch: pytest.MonkeyPatch) -> Bank:
    monkeypatch.setattr(Bank, "closed", False)
    return Bank(system, engine_)


@pytest.mark.parametrize(
    ("child", "is_old", "is_behind"),
    [
        pytest.param(*given, marks=pytest.mark.long if sum(given) % 2 else ())  # the others cover each pair of values
        for given in itertools.product([False, True], repeat=3)
    ],
)
def test_a_reset_of_an_ended_run_knows_the_messages_that_it_repeats(
    bank: Bank, child: bool, is_old: bool, is_behind: bool
) -> None:
    first = bank.open(child=child)
    bank.signal(first, 1, "m-1")
    assert bank.pay(first, 10, "m-1") == 10
    to = first.history().events[-1].number if is_behind else 2
    first.terminate()
    bank.rest()
    again = bank.reset(first, to)
    for _ in range(2):
        if is_old:
            bank.forget_answers()
        bank.signal(again, 1, "m-1")
        assert bank.pay(again, 10, "m-1") == 10
        assert bank.pay(again, 5, "m-2") == 15
        bank.signal(again, 2, "m-2")
        bank.signal(again, CONTINUE)
    if not child:
        starting = bank.account.run.starting(id="a-1", update=(bank.account.pay, 10), update_id="m-1")
        assert starting.start().update_handle("m-1", bank.account.pay).result(0.1) == 10
        bank.rest()
    bank.signal(again, END)
    assert again.result(0) == (15, [1, 2])
    assert first.status() == "terminated"
    assert first.update_handle("m-1", bank.account.pay).result(0.1) == 10


@pytest.mark.parametrize("ended", [False, True], ids=["open", "ended"])
def test_an_update_that_failed_can_be_sent_again_after_a_reset(bank: Bank, ended: bool) -> None:
    first = bank.open(child=False)
    Bank.closed = True
    with pytest.raises(HandlerFailed, match="closed"):
        bank.pay(first, 10, "m-1")
    with pytest.raises(HandlerFailed, match="closed"):
        bank.pay(first, 10, "m-1")
    Bank.closed = False
    if ended:
        first.terminate()
        bank.rest()
    again = bank.reset(first, 2)
    assert bank.pay(again, 10, "m-1") == bank.pay(again, 10, "m-1") == 10
    bank.signal(again, END)
    assert again.result(0) == (10, [])
    if ended:
        bank.forget_answers()
        with pytest.raises(HandlerFailed, match="closed"):
            first.update_handle("m-1").result(0.1)


@pytest.mark.parametrize("ended", [False, True], ids=["open", "ended"])
def test_a_rejected_update_sent_again_is_recognized_after_a_reset(bank: Bank, ended: bool) -> None:
    first = bank.open(child=False)
    sent = first.options(id="m-1").start_update("pay", "much")
    bank.rest()
    with pytest.raises(InvalidArguments):
        sent.result(0.1)
    assert bank.pay(first, 10, "m-1") == 10
    if ended:
        first.terminate()
        bank.rest()
    again = bank.reset(first, 2)
    assert bank.pay(again, 10, "m-1") == 10
    bank.forget_answers()
    assert bank.pay(again, 10, "m-1") == 10
    bank.signal(again, END)
    assert again.result(0) == (10, [])


def test_resets_of_the_same_run_have_separate_message_ids(bank: Bank) -> None:
    first = bank.open(child=False)
    first.terminate()
    bank.rest()
    for number in (1, 2):
        again = bank.reset(first, 2)
        bank.signal(again, number, "m-1")
        assert bank.pay(again, number, "m-1") == number
        bank.signal(again, END)
        assert again.result(0) == (number, [number])


@pytest.mark.parametrize("child", [False, True], ids=["run", "child"])
@pytest.mark.parametrize("how", ["continue", "reset", "reset behind", "parent reset"])
def test_message_ids_count_once_across_continuations_and_resets(bank: Bank, child: bool, how: str) -> None:
    first = bank.open(child=child)
    bank.signal(first, CONTINUE)
    second = bank.newest(first)
    bank.signal(second, 1, "m-1")
    assert bank.pay(second, 10, "m-1") == 10
    if how == "continue":
        bank.signal(second, CONTINUE)
    elif how.startswith("reset"):
        bank.reset(second, 2 if how == "reset" else second.history().events[-1].number)
    elif child:
        (row,) = bank.system.sql("SELECT id::text FROM orchestrator.runs WHERE workflow = 'parent'")
        bank.reset(bank.system.app.workflow_run(row["id"]), 3)
    for _ in range(2):
        for handle in (first, second, bank.newest(second)):
            bank.signal(handle, 1, "m-1")
            assert bank.pay(handle, 10, "m-1") == 10
        bank.forget_answers()
    bank.signal(second, END)
    assert first.result(0) == (10, [1])


@pytest.mark.parametrize("child", [False, True], ids=["run", "child"])
def test_updates_of_all_runs_of_a_chain_are_remembered(bank: Bank, child: bool) -> None:
    first = bank.open(child=child)
    for number in range(1, 6):
        assert bank.pay(first, 1, f"m-{number}") == number
        bank.signal(first, CONTINUE)
    bank.forget_answers()
    for number in range(1, 6):
        for handle in (first, bank.newest(first)):
            assert bank.pay(handle, 1, f"m-{number}") == number
        if not child:
            starting = bank.account.run.starting(
                id="a-1", update=(bank.account.pay, 1), update_id=f"m-{number}"
            ).start()
            bank.rest()
            assert starting.update_handle(f"m-{number}").result(0.1) == number
    bank.signal(first, END)
    assert first.result(0) == (5, [])


def test_a_long_chain_is_searched_from_its_newest_run_on(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bank.open(child=False)
    for number in range(1, 6):
        bank.pay(first, 1, f"m-{number}")
        bank.signal(first, CONTINUE)
    bank.forget_answers()
    monkeypatch.setattr(runs, "_MAX_EVENTS", 12)
    assert bank.pay(first, 1, "m-1") == 1  # the first run of a chain is always searched
    assert bank.pay(first, 1, "m-5") == 5
    assert bank.pay(first, 1, "m-2") == 6


@pytest.mark.parametrize("is_previous", [False, True], ids=["this release", "the previous release"])
def test_message_ids_work_over_http_with_this_and_the_previous_release(
    bank: Bank, is_previous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bank.open(child=False)
    assert bank.pay(first, 10, "m-1") == 10
    bank.signal(first, CONTINUE)
    second, app = bank.newest(first), create_app(bank.system.app.settings)

    async def without_call(scope: Any, *channels: Any) -> None:
        if is_previous and scope.get("path") == "/api/v1/client/code/request_of":
            scope |= {"path": "/api/v1/client/code/unheard_of", "raw_path": b"/api/v1/client/code/unheard_of"}
        await app(scope, *channels)

    monkeypatch.setattr("tests.integration.serving.create_app", lambda _: without_call)
    with serving(bank.system.app.settings) as url, Orchestrator(load_settings(environ={}), api_url=url) as away:
        handle = away.workflow_run(second.id)
        assert bank.pay(handle, 10, "m-1") == (20 if is_previous else 10)
        assert bank.pay(handle, 5, "m-2") == bank.pay(handle, 5, "m-2") == (25 if is_previous else 15)
        bank.signal(handle, 1, "m-2")
        bank.signal(handle, 1, "m-2")
    bank.signal(second, END)
    assert second.result(0) == (25 if is_previous else 15, [1])
