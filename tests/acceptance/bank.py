"""A bank, for real workers that are given the database. Its tasks kill their own process where they are told to."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from project import log, wait_for
from sqlalchemy import text

from orchestrator import AttemptOver, Orchestrator, TaskAborted, TaskContext

app = Orchestrator()

_MOVE = text("UPDATE accounts SET balance = balance + :amount WHERE name = :name RETURNING balance")
_ENTER = text("INSERT INTO ledger (transfer, attempt) VALUES (:transfer, :attempt)")

STEPS = ("before it begins", "inside", "before the commit", "after the commit", "never")


class Fate:
    """Where one transfer dies, once."""

    def __init__(self, folder: str, transfer: int, step: str) -> None:
        self._mark = Path(folder) / f"died-{transfer}"
        self._step = step

    def strikes(self, step: str) -> None:
        if step == self._step and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@app.task
def receipt(transfer: int) -> int:
    return transfer


@app.task
def transfer(ctx: TaskContext, folder: str, number: int, step: str) -> int:
    fate = Fate(folder, number, step)
    log(f"{folder}/began", str(number))
    fate.strikes("before it begins")
    with ctx.transaction() as connection:
        connection.execute(_MOVE, {"name": "Ann", "amount": -1})
        fate.strikes("inside")
        connection.execute(_MOVE, {"name": "Bob", "amount": 1})
        connection.execute(_ENTER, {"transfer": number, "attempt": ctx.attempt})
        receipt.enqueue(number)
        ctx.complete(number)
        fate.strikes("before the commit")
    fate.strikes("after the commit")
    return number


@app.task
def slow_transfer(ctx: TaskContext, folder: str, number: int) -> str:
    """Stand still inside the block, in the first attempt, until there is leave to go on."""
    log(f"{folder}/began", str(ctx.attempt))
    try:
        with ctx.transaction() as connection:
            connection.execute(_ENTER, {"transfer": number, "attempt": ctx.attempt})
            if len(Path(f"{folder}/began").read_text().splitlines()) == 1:
                wait_for(f"{folder}/go")
            ctx.complete(f"attempt {ctx.attempt}")
    except (AttemptOver, TaskAborted) as error:  # the leader's order to stop may come first
        log(f"{folder}/over", type(error).__name__)
        raise
    return f"attempt {ctx.attempt}"


@app.task
def raises_after(ctx: TaskContext) -> str:
    with ctx.transaction():
        ctx.complete("done")
    raise RuntimeError("too late to fail")


@app.task(timeout=0.3, retries=0)
def late_transfer(ctx: TaskContext, folder: str, number: int, swallowed: str) -> str:
    """Swallow the timeout before the block or inside it, and go on."""
    if swallowed == "before the block":
        _swallow_timeout()
    try:
        _transfer_late(ctx, number, _swallow_timeout if swallowed == "inside the block" else None)
    except Exception as error:
        log(f"{folder}/refused", type(error).__name__)
        raise
    return "paid"


@app.task(timeout=0.3, retries=0)
async def late_transfer_in_thread(ctx: TaskContext, folder: str, number: int, swallowed: str) -> str:
    """Leave a thread behind that goes on when the task is cancelled."""

    def go_on() -> None:
        while not ctx.cancelled:
            time.sleep(0.01)
        try:
            _transfer_late(ctx, number, None)
        except Exception as error:  # noqa: BLE001
            log(f"{folder}/refused", type(error).__name__)

    await asyncio.to_thread(go_on)
    return swallowed


def _transfer_late(ctx: TaskContext, number: int, inside: Callable[[], None] | None) -> None:
    with ctx.transaction() as connection:
        connection.execute(_ENTER, {"transfer": number, "attempt": ctx.attempt})
        if inside is not None:
            inside()
        ctx.complete("paid")


def _swallow_timeout() -> None:
    try:
        while True:
            time.sleep(0.01)
    except OSError:
        pass
