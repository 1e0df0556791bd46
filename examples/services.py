"""Three services over HTTP, which tasks and flows of any application can call.

orchestrator api &                                                                  # the registry
orchestrator serve --app services:app --port 8080 --registry http://localhost:8000
curl -d '{"input": [1, 2, 3]}' localhost:8080/exec/sum                              # {"result":6,"error":""}
curl localhost:8000/workers/list?service=sum
"""

from __future__ import annotations

from typing import Any

from orchestrator import GiveUp, Orchestrator

app = Orchestrator()


@app.task(name="transform")
def transform(input: str | int | float, params: dict[str, Any]) -> str | int | float:
    """Multiply a number, or write a text in capital or small letters."""
    if not isinstance(input, str):
        return input * params.get("mul", 1)
    changes = {"upper": str.upper, "lower": str.lower}
    if params.get("op") not in changes:
        raise GiveUp(f"params.op: expected upper or lower, found {params.get('op')!r}.")
    return changes[params["op"]](input)


@app.task(name="sum")
def add_up(input: list[int | float]) -> int | float:
    """Return the sum of a list."""
    return sum(input)


@app.task(name="route")
async def route(params: dict[str, Any]) -> dict[str, str]:
    """Return the action that selects a flow's next node."""
    return {"action": params.get("action", "goB")}
