"""A flow with a node of every kind.

Each task returns its token, so that the shared state shows which results arrived.
"""

from __future__ import annotations

from typing import Any, Final

from orchestrator import Retry, TaskContext
from tests.chaos.real.project.base import app, spend, token, written_down

ROUNDS: Final = 3
BESIDE: Final = 3
ASKED: Final = "ok"
"""The key of the signal that the flow waits for."""
ASKING: Final = "inner/ask"
"""Path of the approval node, which `outsider.py` approves."""


@app.task(retries=Retry(max=2, backoff="constant", base=0.2))
def errand(context: TaskContext, input: Any = None, seconds: float = 0.05) -> dict[str, Any]:
    """Return a token, and the input plus one."""
    with written_down(context):
        spend(seconds)
    return {"token": token(context), "number": (input if isinstance(input, int) else 0) + 1}


def _node(**fields: Any) -> dict[str, Any]:
    return {"exec_type": "local_func", "func": errand.name, **fields}


FLOW: Final[dict[str, Any]] = {
    "start": "count",
    "nodes": {
        "count": _node(prep={"input_key": "$shared.count.number"}, post={"output_key": "count"}),
        "again": {
            "kind": "choice",
            "choice_cases": [{"action": "on", "expr": {"lt": ["$shared.count.number", ROUNDS]}}],
            "default_action": "enough",
        },
        "beside": _node(
            kind="parallel",
            parallel_mode="concurrent",
            parallel_services=[errand.name] * BESIDE,
            post={"output_key": "beside"},
        ),
        "each": _node(
            kind="foreach",
            parallel_mode="concurrent",
            max_parallel=2,
            prep={"input_key": "$params.items"},
            post={"output_key": "each"},
        ),
        "pause": {"kind": "timer", "params": {"delay_ms": 300}},
        "inner": {
            "kind": "subflow",
            "post": {"output_key": "inner"},
            "subflow": {
                "start": "ask",
                "nodes": {
                    "ask": {"kind": "approval", "params": {"approval_key": ASKED, "timeout_ms": 3_600_000}},
                    "own": _node(post={"output_key": "own"}),
                    "event": {"kind": "wait_event", "params": {"signal_key": f"$shared.{ASKED}"}},
                },
                "edges": [{"from": "ask", "action": "approved", "to": "own"}, {"from": "own", "to": "event"}],
            },
        },
    },
    "edges": [
        {"from": "count", "to": "again"},
        {"from": "again", "action": "on", "to": "count"},
        {"from": "again", "action": "enough", "to": "beside"},
        {"from": "beside", "to": "each"},
        {"from": "each", "to": "pause"},
        {"from": "pause", "to": "inner"},
    ],
}
VISITS: Final = (
    *("count", "again") * ROUNDS,
    *("beside", "each", "pause", "inner/ask", "inner/own", "inner/event", "inner"),
)
"""The nodes that a successful run visits, in order."""
