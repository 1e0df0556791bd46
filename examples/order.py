"""An order as a flow graph: priced in parallel, approved by a person if it is large, shipped item by item.

orchestrator dev --app order:app
python order.py                                               # in a second terminal in this folder
orchestrator flows show order
orchestrator flows runs order
"""

from __future__ import annotations

from typing import Any

from orchestrator import FlowGraph, Orchestrator

app = Orchestrator()


@app.task
def goods(input: list[dict[str, Any]]) -> int:
    """Add up the prices of the items."""
    return sum(int(item["cents"]) for item in input)


@app.task
def postage(input: list[dict[str, Any]]) -> int:
    """Return the cost of sending the items."""
    return 300 + 50 * len(input)


@app.task
def total(input: list[int]) -> int:
    """Add up."""
    return sum(input)


@app.task(retries=5)
def ship(input: dict[str, Any]) -> str:
    """Send one item."""
    return f"{input['name']} is on its way"


@app.task
def refuse(input: int) -> str:
    """Tell the customer."""
    return f"not sold for {input}"


order = FlowGraph("price", description="Price, ask if it is large, ship.")
order.parallel("price", run=[goods, postage], input="$params.items", output="prices", to="total")
order.executor("total", run=total, input="$shared.prices", output="cents", to="large")
order.choice("large", cases={"ask": {"ge": ["$shared.cents", 10_000]}}, to={"ask": "ask", "default": "ship"})
order.approval("ask", timeout=3 * 86_400, to={"approved": "ship", "rejected": "refuse", "timeout": "refuse"})
order.foreach("ship", run=ship, input="$params.items", output="shipped", max_retries=3)
order.executor("refuse", run=refuse, input="$shared.cents", output="refused")


def main() -> None:
    """Publish the flow, and sell three orders."""
    app.flows.publish("order", order)
    pen, desk = {"name": "pen", "cents": 250}, {"name": "desk", "cents": 45_000}
    print(app.flows["order"].start(items=[pen]).result(timeout=60)["shipped"])
    for is_sold in (True, False):
        run = app.flows["order"].start(items=[pen, desk])
        (run.approve if is_sold else run.reject)(node="ask", why="as the customer wishes")
        result = run.result(timeout=60)
        print(result["shipped"] if is_sold else result["refused"])


if __name__ == "__main__":
    main()
