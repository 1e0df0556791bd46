"""The Celery program with the tasks of the bridge tests."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from tests.chaos.bridge import journal

VISIBILITY = 20
"""Seconds after which Celery redelivers messages that a dead worker had reserved."""

app = Celery("shop", broker=os.environ["BRIDGE_BROKER"], backend=os.environ["BRIDGE_RESULTS"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": VISIBILITY},
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
)


@app.task(name="shop.note")
def note(what: str, seconds: float) -> str:
    return journal.note("celery", what, seconds)


@app.task(name="shop.fail_once", bind=True, max_retries=20)
def fail_once(self: Any, what: str, seconds: float) -> str:
    if journal.fails("celery", what):
        raise self.retry(countdown=1)
    return journal.note("celery", what, seconds)
