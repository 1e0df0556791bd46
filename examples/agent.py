"""An agent that decides, uses a tool and decides again, within a budget; a person approves expensive steps.

The loop is a flow graph: each decision and each use of a tool is a task, so you can inspect, stop and resume the run.
The model here is a script; put a real one in `decide`.

    orchestrator dev --app agent:app
    python agent.py                                               # in a second terminal in this folder
    orchestrator flows runs agent
"""

from __future__ import annotations

from typing import Any

from orchestrator import FlowGraph, Orchestrator

app = Orchestrator()

SCRIPT: list[dict[str, Any]] = [
    {"action": "tool", "tool": "search", "argument": "price of paint"},
    {"action": "tool", "tool": "add", "argument": [120, 80]},
    {"action": "expensive", "tool": "buy", "argument": "paint"},
    {"action": "answer", "text": "Painted for 200."},
]
"""The model's answers, in order."""


@app.task
def decide(input: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """Ask the model for the next step, given the results so far."""
    known = input["known"] or []
    if len(known) >= params["budget"]:
        return {"action": "answer", "text": f"Out of budget after {len(known)} steps."}
    return SCRIPT[min(len(known), len(SCRIPT) - 1)]


@app.task(retries=2)
def use(input: dict[str, Any]) -> list[Any]:
    """Use a tool, and add its result to the results so far."""
    step = input["step"]
    tools = {"search": lambda text: f"{text}: 120", "add": sum, "buy": lambda what: f"bought {what}"}
    return [*(input["known"] or []), tools[step["tool"]](step["argument"])]


@app.task
def refused(input: list[Any] | None) -> list[Any]:
    """Tell the model that a person rejected the step."""
    return [*(input or []), "refused by a person"]


agent = FlowGraph("decide", max_steps=1_000, description="Decide, use a tool, decide again.")
agent.executor(
    "decide",
    run=decide,
    input={"known": "$shared.known"},
    output="step",
    action_key="action",
    to={"tool": "use", "expensive": "ask", "answer": ""},
)
agent.executor("use", run=use, input={"step": "$shared.step", "known": "$shared.known"}, output="known", to="decide")
agent.approval("ask", params={"consume": True}, to={"approved": "use", "rejected": "refused"})
agent.executor("refused", run=refused, input="$shared.known", output="known", to="decide")


def main() -> None:
    """Publish the flow, and start it twice: with a sufficient budget, and with a budget that is too small."""
    app.flows.publish("agent", agent)
    run = app.flows["agent"].start(budget=10)
    run.approve(node="ask", why="we need the paint")
    result = run.result(timeout=60)
    print(result["step"]["text"])
    print(result["known"])
    poor = app.flows["agent"].start(budget=1)
    print(poor.result(timeout=60)["step"]["text"])


if __name__ == "__main__":
    main()
