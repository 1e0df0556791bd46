"""A nightly ETL: extract a day's sales by region, load each into a table exactly once, then report.

The graph and its schedule are in nightly.yaml. A missed night is run later. You can retry a failed region alone
(`orchestrator runs retry ID`). No row is loaded twice: one transaction writes a region's rows and completes its task.

    orchestrator dev --app nightly:app
    python nightly.py 2026-01-31                # in a second terminal in this folder: one day, now
    orchestrator schedules backfill nightly-sales --from 2026-01-01 --to 2026-02-01 --watch
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from sqlalchemy import text

from orchestrator import Orchestrator, TaskContext

app = Orchestrator()
REGIONS = ["north", "south", "east", "west"]

TABLE = text("CREATE TABLE IF NOT EXISTS sales (day date, region text, item int, amount int)")
LOCK = text("SELECT pg_advisory_xact_lock(20260131)")  # two tasks that create the table at the same time would collide
INSERT = text("INSERT INTO sales VALUES (:day, :region, :item, :amount)")


@app.task
def regions() -> list[str]:
    """Return the regions to load."""
    return REGIONS


@app.task
def load(ctx: TaskContext, day: str, region: str) -> int:
    """Load a region's sales of one day; return the sum."""
    source = random.Random(f"{day} {region}")  # stands for a file or a service
    rows = [{"day": day, "region": region, "item": item, "amount": source.randint(1, 100)} for item in range(50)]
    with ctx.transaction() as connection:
        connection.execute(LOCK)
        connection.execute(TABLE)
        connection.execute(INSERT, rows)
        return ctx.complete(sum(row["amount"] for row in rows))


@app.task
def report(day: str, load: list[int]) -> dict[str, Any]:
    """Sum up the loaded sales."""
    return {"day": day, "total": sum(load), "regions": dict(zip(REGIONS, load, strict=True))}


@app.task
def page(run_id: str, workflow: str) -> None:
    """Alert the person on call."""
    print(f"{workflow} went wrong: orchestrator runs show {run_id}")


if __name__ == "__main__":
    app.workflows.apply(Path(__file__).with_suffix(".yaml"))
    run = app.workflows["nightly-sales"].start(day=sys.argv[1])
    print(run.wait_ended(timeout=120), run.outputs()["report"])
