"""Bank transfers for workers with access to the database. Tasks kill their own process at a given step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from project import log, wait_for
from sqlalchemy import text

from orchestrator import AttemptOver, Orchestrator, TaskAborted, TaskContext

app = Orchestrator()

_MOVE = text("UPDATE accounts SET balance = balance + :amount WHERE name = :name RETURNING balance")
_ENTER = text("INSERT INTO ledger (transfer, attempt) VALUES (:transfer, :attempt)")

STEPS = ("before it begins", "inside", "before the commit", "after the commit", "never")


class Fate:
    """The step at which a transfer kills its process, once."""

    def __init__(self, folder: str, transfer: int, step: str) -> None:
        self._marker = Path(folder) / f"died-{transfer}"
        self._step = step

    def kill_at(self, step: str) -> None:
        if step == self._step and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@app.task
def receipt(transfer: int) -> int:
    return transfer


@app.task
def transfer(ctx: TaskContext, folder: str, number: int, step: str) -> int:
    fate = Fate(folder, number, step)
    log(f"{folder}/began", str(number))
    fate.kill_at("before it begins")
    with ctx.transaction() as connection:
        connection.execute(_MOVE, {"name": "Ann", "amount": -1})
        fate.kill_at("inside")
        connection.execute(_MOVE, {"name": "Bob", "amount": 1})
        connection.execute(_ENTER, {"transfer": number, "attempt": ctx.attempt})
        receipt.enqueue(number)
        ctx.complete(number)
        fate.kill_at("before the commit")
    fate.kill_at("after the commit")
    return number


@app.task
def slow_transfer(ctx: TaskContext, folder: str, number: int) -> str:
    """Wait inside the transaction, in the first attempt, until the file `go` exists."""
    log(f"{folder}/began", str(ctx.attempt))
    try:
        with ctx.transaction() as connection:
            connection.execute(_ENTER, {"transfer": number, "attempt": ctx.attempt})
            if len(Path(f"{folder}/began").read_text().splitlines()) == 1:
                wait_for(f"{folder}/go")
            ctx.complete(f"attempt {ctx.attempt}")
    except (AttemptOver, TaskAborted) as error:  # the leader's order to stop may arrive first
        log(f"{folder}/over", type(error).__name__)
        raise
    return f"attempt {ctx.attempt}"
