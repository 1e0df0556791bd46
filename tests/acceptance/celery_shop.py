"""The tasks of the bridge tests as a Celery program, imported by Celery's producers and workers."""

from __future__ import annotations

import os
import time
from pathlib import Path

from celery import Celery

app = Celery("shop", broker=os.environ.get("SHOP_BROKER"), backend=os.environ.get("SHOP_RESULTS"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
)


@app.task(name="shop.note")
def note(what: str, seconds: float = 0.0) -> str:
    with (Path(os.environ["BRIDGED"]) / "journal").open("a") as journal:
        journal.write(f"celery {what}\n")
    time.sleep(seconds)
    return what


@app.task(name="shop.add")
def add(one: int, other: int) -> int:
    return one + other
