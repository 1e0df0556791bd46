"""Workers are killed at every step of a transfer, and the balances are checked."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.stack import Process, Stack, using
from tests.waiting import eventually

import bank  # isort: skip  # a top-level module, as the workers see it


@pytest.fixture
def settings() -> dict[str, float]:
    return {"heartbeat": 0.3, "worker_ttl": 1.5, "loss_limit": 10}


@pytest.fixture
def bank_stack(stack: Stack) -> Iterator[Stack]:
    """A leader, and the bank's tables."""
    with stack.engine.connect() as connection:
        connection.exec_driver_sql(
            "DROP TABLE IF EXISTS accounts, ledger; CREATE TABLE accounts (name text PRIMARY KEY, balance int);"
            "CREATE TABLE ledger (transfer int, attempt int); INSERT INTO accounts VALUES ('Ann', 100), ('Bob', 0)"
        )
    with using(bank.app, stack):
        stack.scheduler()
        yield stack


def worker(stack: Stack, processes: int = 1) -> Process:
    return stack.worker("--app", "bank:app", "--database", "--concurrency", "2", processes=processes)


@pytest.mark.parametrize("deaths", [1, pytest.param(3, marks=pytest.mark.long)])
def test_every_transfer_happens_once_although_its_worker_dies(bank_stack: Stack, tmp_path: Path, deaths: int) -> None:
    """`deaths` transfers die at each step; five never do."""
    worker(bank_stack, processes=2)
    steps = [*bank.STEPS * deaths, *["never"] * 5]
    count = len(steps)
    calls = [(str(tmp_path), number, step) for number, step in enumerate(steps)]
    handles = bank.app.enqueue_many(bank.transfer, calls)
    assert [handle.result(120) for handle in handles] == list(range(count))

    assert dict(bank_stack.sql("SELECT name, balance FROM accounts")) == {"Ann": 100 - count, "Bob": count}
    assert Counter(row[0] for row in bank_stack.sql("SELECT transfer FROM ledger")) == Counter(range(count))
    died = {int(path.name.removeprefix("died-")) for path in tmp_path.glob("died-*")}
    spared = {number for number, step in enumerate(steps) if step != "never"} - died
    # A neighbor killed the process after the commit; the transfer did not start again.
    assert {steps[number] for number in spared} <= {"after the commit"}

    # The recorded attempt is the one that wrote.
    ended = bank_stack.sql("SELECT id, attempt FROM orchestrator.ended_tasks WHERE name = 'bank.transfer'")
    assert len(ended) == count
    attempts: dict[int, int] = dict(bank_stack.sql("SELECT transfer, attempt FROM ledger"))
    by_id = {str(task): attempt for task, attempt in ended}
    assert {number: by_id[handle.id] for number, handle in enumerate(handles)} == attempts

    # A transfer that died after its commit did not start again.
    began = Counter(int(line) for line in (tmp_path / "began").read_text().split())
    written = {number: attempts[number] for number, step in enumerate(steps) if step == "after the commit"}
    assert all(began[number] <= attempt for number, attempt in written.items())

    # The task that it enqueued exists once, too.
    receipts = "SELECT count(*) FROM orchestrator.ended_tasks WHERE name = 'bank.receipt' AND status = 'success'"
    eventually(lambda: bank_stack.scalar(receipts) == count, "all receipts")
    eventually(lambda: not bank_stack.sql("SELECT FROM orchestrator.inbox"), "an empty inbox")
    assert bank_stack.sql("SELECT FROM orchestrator.tasks") == []


def test_a_stalled_worker_cannot_complete_an_attempt_late(bank_stack: Stack, tmp_path: Path) -> None:
    began, over = tmp_path / "began", tmp_path / "over"
    stopped = bank_stack.worker("--app", "bank:app", "--database")
    handle = bank.slow_transfer.enqueue(str(tmp_path), 1)
    eventually(lambda: began.exists() and began.read_text(), "the first attempt")
    stopped.signal_group(signal.SIGSTOP)
    worker(bank_stack)
    attempt = int(handle.result(60).removeprefix("attempt "))
    assert attempt > 1
    (tmp_path / "go").touch()
    stopped.signal_group(signal.SIGCONT)
    eventually(over.exists, "the first attempt learns that it is over")
    assert bank_stack.sql("SELECT transfer, attempt FROM ledger") == [(1, attempt)]
    assert handle.status() == "success"
