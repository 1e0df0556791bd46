"""Tasks written for Celery, with only the import changed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from orchestrator.compat.celery import Celery, chain
from orchestrator.compat.celery.exceptions import Ignore

app = Celery("shop")


def write(*words: object) -> None:
    with (Path(os.environ["BRIDGED"]) / "journal").open("a") as journal:
        journal.write(" ".join(map(str, words)) + "\n")


@app.task(name="shop.ask", bind=True, max_retries=5)
def ask(self: Any) -> list[Any]:
    if self.request.retries < 2:
        raise self.retry(countdown=0)
    return [self.request.id, self.request.retries, self.request.headers["customer"]]


@app.task(name="shop.miss")
def miss() -> None:
    raise KeyError("missing")


@app.task(name="shop.kinds")
def kinds(*values: Any) -> list[Any]:
    return [[type(value).__name__ for value in values], *values]


@app.task(name="shop.add")
def add(one: int, other: int) -> int:
    return one + other


@app.task(name="shop.total")
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(name="shop.note")
def note(what: str) -> None:
    write("note", what)


@app.task(name="shop.factorial", bind=True)
def factorial(self: Any, number: int, product: int = 1) -> int:
    return product if number < 2 else self.replace(self.s(number - 1, product * number))


@app.task(name="shop.replace_by_chain", bind=True)
def replace_by_chain(self: Any, number: int) -> None:
    self.replace(chain(add.s(number, 1), add.s(2)))


@app.task(name="shop.replace_by_failure", bind=True)
def replace_by_failure(self: Any) -> None:
    self.replace(miss.s())


@app.task(name="shop.ignore", bind=True)
def ignore(self: Any, state: str | None = None) -> None:
    if state is not None:
        self.update_state(state=state, meta={"exc_type": "ValueError", "exc_message": "own", "exc_module": "builtins"})
    raise Ignore


@app.task(name="shop.by_error")
def by_error(request: Any, exc: Exception, tb: str | None) -> None:
    write("by_error", request.id, request.task, repr(exc), tb is None or "Traceback" in tb)


@app.task(name="shop.by_id")
def by_id(task_id: str) -> None:
    write("by_id", task_id)


@app.task(name="shop.by_bound", bind=True)
def by_bound(self: Any, *arguments: Any) -> None:
    write("by_bound", *arguments)


@app.task(name="shop.sleep")
def sleep(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.05)
