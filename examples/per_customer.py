"""Calls of somebody else's API that allows each customer five a second, and all of them twenty at a time.

One customer's flood does not delay another's first call: customers take turns, and the limits hold for the whole fleet,
however many workers there are.

    orchestrator dev --app per_customer:app
    python per_customer.py                      # in a second terminal in this folder
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

from orchestrator import Orchestrator, Rate, RetryLater, gather

app = Orchestrator()


class Busy(Exception):
    """The other side asks to come back later."""


def call(customer: str, number: int) -> str:
    """Stand for a request to the API."""
    return f"{customer} {number} at {datetime.now(UTC):%H:%M:%S.%f}"


@app.task(
    concurrency_key=lambda customer, **_: customer,
    rate=Rate(5, per=1, burst=1),  # of each customer, evenly spread
    total_concurrency=20,  # all customers together
    timeout=10,
    retries=5,
)
def sync(customer: str, number: int) -> str:
    """Send one change of a customer."""
    try:
        return call(customer, number)
    except Busy:
        raise RetryLater(30) from None  # not a failure, and charged to no retry


if __name__ == "__main__":
    began = time.monotonic()
    flood = app.enqueue_many(sync, [("acme", number) for number in range(15)])
    first = sync.enqueue("globex", 0)
    print(first.result(timeout=30), f"(after {time.monotonic() - began:.1f} s)")
    gather(flood, timeout=60)
    print(f"15 of acme after {time.monotonic() - began:.1f} s")
