"""A web application that enqueues slow work and reports its progress.

pip install fastapi uvicorn
orchestrator dev --app web:tasks
uvicorn web:api                             # in a second terminal in this folder
curl -X POST localhost:8000/reports/7
curl localhost:8000/reports/ID              # the id that the first call returned
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException

from orchestrator import NotFound, Orchestrator, ResultTimeout, TaskContext, TaskEnded, Unavailable

tasks = Orchestrator()


@tasks.task(retries=3, timeout=60)
def build_report(ctx: TaskContext, customer: int) -> dict[str, int]:
    """Count a customer's pages."""
    pages = 3
    for page in range(pages):
        ctx.progress(page / pages, f"page {page + 1} of {pages}")
    return {"customer": customer, "pages": pages}


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with tasks:  # closes its connections at the end
        yield


api = FastAPI(lifespan=lifespan)


@api.post("/reports/{customer}", status_code=202)
async def order_report(customer: int) -> dict[str, str]:
    """Order a report; two requests for the same customer at a time share one report."""
    try:
        handle = await build_report.options(unique_key=str(customer)).aenqueue(customer)
    except Unavailable as error:  # nothing was written: the client may try again
        raise HTTPException(503, str(error)) from None
    return {"id": handle.id}


@api.get("/reports/{id}")
async def show_report(id: str) -> dict[str, Any]:
    """Return a report, or its status after waiting for at most two seconds."""
    try:
        return {"status": "success", "report": await tasks.handle(id).aresult(timeout=2)}
    except ResultTimeout:
        return {"status": "on its way"}
    except TaskEnded as error:  # failed, cancelled or skipped
        return {"status": type(error).__name__, "reason": str(error)}
    except NotFound as error:
        raise HTTPException(404, str(error)) from None
