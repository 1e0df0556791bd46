"""Calls of an external API that allows five calls a second per customer, and twenty calls at a time in total.

One customer's flood does not delay another's first call: customers take turns. The limits hold for the whole fleet,
regardless of the number of workers.

    orchestrator dev --app per_customer:app
    python per_customer.py                      # in a second terminal in this folder
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

from orchestrator import Orchestrator, Rate, RetryLater, gather

app = Orchestrator()


class Busy(Exception):
    """The API asks to retry later."""


def call(customer: str, number: int) -> str:
    """Simulate a request to the API."""
    return f"{customer} {number} at {datetime.now(UTC):%H:%M:%S.%f}"


@app.task(
    concurrency_key=lambda customer, **_: customer,
    rate=Rate(5, per=1, burst=1),  # for each customer, evenly spaced
    total_concurrency=20,  # across all customers
    timeout=10,
    retries=5,
)
def sync(customer: str, number: int) -> str:
    """Send one change of a customer."""
    try:
        return call(customer, number)
    except Busy:
        raise RetryLater(30) from None  # does not count as a failure or a retry


if __name__ == "__main__":
    began = time.monotonic()
    flood = app.enqueue_many(sync, [("acme", number) for number in range(15)])
    first = sync.enqueue("globex", 0)
    print(first.result(timeout=30), f"(after {time.monotonic() - began:.1f} s)")
    gather(flood, timeout=60)
    print(f"15 of acme after {time.monotonic() - began:.1f} s")
