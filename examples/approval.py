"""An order that is charged, waits for a person's approval for up to three days, and is shipped or refunded.

It is an ordinary async function. Kill the worker while it waits, or come back tomorrow: it continues where it stopped.

    orchestrator dev --app approval:app
    python approval.py o-1                                        # in a second terminal in this folder
    orchestrator runs show o-1                                    # it waits for the promise `approval`
    orchestrator runs resolve o-1 approval '{"approved": true, "by": "Ann"}'
    orchestrator runs show o-1
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from datetime import timedelta

from orchestrator import Orchestrator, WorkflowContext, WorkflowFailed

app = Orchestrator()


@dataclass
class Decision:
    """A person's decision about an order."""

    approved: bool
    by: str


# Each task stands for a call of another service. The order's id lets that service recognize a repeated call.
@app.task(retries=5)
def charge(order_id: str, cents: int) -> str:
    """Take the money."""
    return f"charge-of-{cents}-for-{order_id}"


@app.task(retries=10)
def refund(charge_id: str) -> None:
    """Return the money."""
    print(f"{charge_id} is refunded")


@app.task(retries=5)
def ship(order_id: str) -> str:
    """Send the parcel; return its tracking number."""
    return f"parcel-of-{order_id}"


@app.workflow
async def order(ctx: WorkflowContext, order_id: str, cents: int) -> str:
    """Charge, ask, ship. If a step fails after the charge, the customer gets the money back."""
    charge_id = await charge.schedule(order_id, cents)
    ctx.compensate(refund, charge_id)  # if anything fails from here on, or somebody cancels
    if cents > 10_000:
        ctx.set("waiting_for", "approval")
        try:
            limit = timedelta(days=3).total_seconds()
            decision = await asyncio.wait_for(ctx.promise("approval", type=Decision), timeout=limit)
        except TimeoutError:
            raise WorkflowFailed("nobody approved it in time") from None
        ctx.clear("waiting_for")
        if not decision.approved:
            raise WorkflowFailed(f"turned down by {decision.by}")
    return await ship.schedule(order_id)


if __name__ == "__main__":
    order_id = sys.argv[1]
    order.starting(id=order_id).start(order_id, cents=25_000)  # a repeated id is rejected: no order is placed twice
    print(f"{order_id} is on its way")
