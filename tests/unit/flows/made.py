"""Random flows, and deterministic services: a result depends on the call only, so that all implementations agree.

The caller passes the function that makes random choices: a Hypothesis draw, or a seeded generator in the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Pick(Protocol):
    """Chooses one of several options."""

    def __call__(self, options: Sequence[T], /) -> T: ...


SERVICES = ("one", "two", "bad")
PARAMS: dict[str, Any] = {"val": 2, "list": [1, 2, 3]}
SIGNALS: dict[str, Any] = {"go": {"n": 1}, "yes": True, "no": "no", "later": "a2"}
"""Values of signals by key. The signal `never` is not sent."""
_KEYS = [f"n{number}" for number in range(5)]
_PATHS = ["", "$params.val", "$params.list", "$shared.x", "y.list", "$input", "$shared.x.list[0]", "$params.gone.deep"]
_ACTIONS = ("a0", "a1", "a2", "default", "default", "error", "timeout", "approved", "rejected")
_STRATEGIES = ("fail_fast", "collect_errors", "ignore_errors", "continue")


def service(name: str, value: Any, params: dict[str, Any]) -> Any:
    """Return a result that depends on the call only; one third of the calls fail."""
    text = f"{name} {value} {params.get('mul')}"
    if name == "bad" or sum(text.encode()) % 3 == 0:
        raise ValueError(f"{name} says no")
    return {"action": f"a{len(text) % 3}", "list": [len(text), name], "of": name}


def comparable(value: Any) -> Any:
    """Return shared state without signals and error messages, for comparison."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key not in SIGNALS}
        return {key: True if key == "_error" else comparable(item) for key, item in kept.items()}
    return [comparable(item) for item in value] if isinstance(value, list) else value


def make_flow(pick: Pick, depth: int = 2, *, max_steps: int, exec_type: str = "") -> dict[str, Any]:
    """Return a random flow of a few nodes of any kind, possibly with loops."""
    keys = _KEYS[: pick(range(1, 5))]
    nodes = {key: _node(pick, depth, max_steps, exec_type) for key in keys}
    targets = {(pick(keys), pick(_ACTIONS)): pick([*keys, ""]) for _ in range(pick(range(8)))}
    edges = [{"from": source, "action": action, "to": to} for (source, action), to in targets.items()]
    return {"start": keys[0], "nodes": nodes, "edges": edges, "max_steps": max_steps}


def _node(pick: Pick, depth: int, max_steps: int, exec_type: str) -> dict[str, Any]:
    kinds = ["executor", "executor", "choice", "parallel", "foreach", "timer", "wait_event", "approval"]
    kind = pick([*kinds, "subflow", "subflow"] if depth else kinds)
    found: dict[str, Any] = {"kind": kind, "params": {"mul": pick(range(4))}}
    if path := pick(_PATHS):
        found["prep"] = {"input_key": path} if pick(range(4)) else {"input_map": {"a": path, "b": "$params.val"}}
    post: dict[str, Any] = {}
    if output := pick(["", "x", "y"]):
        post["output_key"] = output
    elif pick(range(4)) == 0:
        post["output_map"] = {"x": "list", "y": "list[0]"}
    if kind != "choice":
        if action := pick(["", "", "a0"]):
            post["action_static"] = action
        elif pick((True, False)) and kind != "approval":
            post["action_key"] = "action"
    if post:
        found["post"] = post
    if kind in ("executor", "parallel", "foreach"):
        found["max_retries"] = pick(range(3))
        found |= {"exec_type": exec_type} if exec_type else {}
    if kind in ("executor", "foreach"):
        found["service"] = pick(SERVICES)
    if kind in ("parallel", "foreach"):
        found["parallel_mode"] = pick(("sequential", "concurrent"))
        found["failure_strategy"] = pick(_STRATEGIES)
        found["max_parallel"] = pick(range(3))
    more = {"choice": _choice, "parallel": _branches, "foreach": _items, "wait_event": _wait, "approval": _approval}
    if kind in more:
        more[kind](pick, found)
    elif kind == "timer":
        found["params"]["delay_ms"] = pick((0, 5, 300))
    elif kind == "subflow":
        found["subflow"] = inner = make_flow(pick, depth - 1, max_steps=max_steps, exec_type=exec_type)
        found["max_retries"] = pick((0, 0, 1))
        own = [key for key, node in inner["nodes"].items() if node["kind"] == "executor"]
        if pick((True, False)) and own:
            found["subflow_execs"] = [{"node": pick(own), "service": "two", "params": {"mul": 5}}]
    return found


def _choice(pick: Pick, node: dict[str, Any]) -> None:
    cases: dict[tuple[str, str], Any] = {}
    for _ in range(pick(range(3))):
        cases[pick(("eq", "ne")), pick(_PATHS[1:])] = pick((2, None, "one"))
    node["choice_cases"] = [
        {"action": f"a{at}", "expr": {operator: [left if left[0] == "$" else f"$shared.{left}", right]}}
        for at, ((operator, left), right) in enumerate(cases.items())
    ]
    node["default_action"] = "a2"


def _branches(pick: Pick, node: dict[str, Any]) -> None:
    number = pick(range(1, 4))
    if pick((True, False)):
        node["parallel_services"] = [pick(("one", "two")) for _ in range(number)]
        return
    is_known = node["parallel_mode"] == "sequential" or node["failure_strategy"] != "fail_fast"
    node["parallel_execs"] = [
        {"service": pick(("one", "two")), "params": {"mul": 7 + position}}
        | ({"prep": {"input_key": "$params.val"}} if pick((True, False)) else {})
        | ({"post": {"output_key": f"b{position}"}} if is_known and pick(range(2)) else {})
        for position in range(number)
    ]


def _items(pick: Pick, node: dict[str, Any]) -> None:
    node["prep"] = {"input_key": pick(("$params.list", "$params.list", "y.list", "$params.val"))}
    if pick((True, False)):
        own: list[dict[str, Any]] = [{"index": 1, "params": {"mul": 8}}, {"index": 2, "service": "two"}]
        node["foreach_execs"] = own[: pick((1, 2))]


def _wait(pick: Pick, node: dict[str, Any]) -> None:
    key = pick(("go", "later", "never"))
    node["params"] |= {"signal_key": f"$shared.{key}", "consume": pick((True, False))}
    node["params"]["timeout_ms"] = 50 if key == "never" else pick((0, 3_600_000))
    node["failure_strategy"] = pick(("fail_fast", "continue"))


def _approval(pick: Pick, node: dict[str, Any]) -> None:
    node["params"] |= {"approval_key": pick(("yes", "no", "later")), "consume": pick((True, False))}
