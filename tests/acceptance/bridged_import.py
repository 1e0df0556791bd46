"""Tasks written for Celery that have changed their import."""

from __future__ import annotations

from typing import Any

from orchestrator.compat.celery import Celery

app = Celery("shop")


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
    return [[type(one).__name__ for one in values], *values]
