"""A nightly ETL: extract a day's sales by region, load each into a table exactly once, then report.

The graph and its schedule stand in nightly.yaml. A night that was missed is made up for; a region that fails is tried
again alone (`orchestrator runs retry ID`), and nothing is ever loaded twice: a region's rows and the task's own end are
one transaction.

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
LOCK = text("SELECT pg_advisory_xact_lock(20260131)")  # two tasks that create one table at once would collide
INSERT = text("INSERT INTO sales VALUES (:day, :region, :item, :amount)")


@app.task
def regions() -> list[str]:
    """Find out what there is to load."""
    return REGIONS


@app.task
def load(ctx: TaskContext, day: str, region: str) -> int:
    """Load what was sold in a region on one day; return the sum."""
    source = random.Random(f"{day} {region}")  # stands for a file or a service
    rows = [{"day": day, "region": region, "item": item, "amount": source.randint(1, 100)} for item in range(50)]
    with ctx.transaction() as connection:
        connection.execute(LOCK)
        connection.execute(TABLE)
        connection.execute(INSERT, rows)
        return ctx.complete(sum(row["amount"] for row in rows))


@app.task
def report(day: str, load: list[int]) -> dict[str, Any]:
    """Sum up what was loaded."""
    return {"day": day, "total": sum(load), "regions": dict(zip(REGIONS, load, strict=True))}


@app.task
def page(run_id: str, workflow: str) -> None:
    """Wake somebody up."""
    print(f"{workflow} went wrong: orchestrator runs show {run_id}")


if __name__ == "__main__":
    app.workflows.apply(Path(__file__).with_suffix(".yaml"))
    run = app.workflows["nightly-sales"].start(day=sys.argv[1])
    print(run.wait_ended(timeout=120), run.outputs()["report"])
