"""The action of a node: which edge follows from its result or from a decision."""

from __future__ import annotations

from typing import Any

from orchestrator.domain.flow.definition import DEFAULT, ERROR, TIMEOUT, Flow, Node
from orchestrator.domain.flow.paths import Names, find, part_of
from orchestrator.errors import ExpressionError

APPROVED = "approved"
REJECTED = "rejected"
_YES = frozenset({"approved", "approve", "accepted", "accept", "yes", "true", "ok"})
_NO = frozenset({"rejected", "reject", "denied", "deny", "no", "false"})


def action_of(node: Node, result: Any) -> str:
    """Return the action of a node from its result."""
    if node.post.action_static:
        return node.post.action_static
    if node.post.action_key:
        source = result if isinstance(result, dict) else {"result": result}
        if action := as_action(part_of(source, node.post.action_key)):
            return action
    return node.default_action or DEFAULT


def fallback_of(node: Node, node_input: Any, names: Names) -> str:
    """Return the action of a choice without a matching case. `action_key` is a key of its input or else a path."""
    post = node.post
    if post.action_key and not post.action_static:
        source = node_input if isinstance(node_input, dict) else {"result": node_input}
        own = None if post.action_key.startswith("$") else part_of(source, post.action_key)
        if action := as_action(find(post.action_key, names) if own is None else own):
            return action
    return post.action_static or node.default_action or DEFAULT


def as_action(value: Any) -> str:
    """Return a value as the name of an action, or an empty string if it cannot be one."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, (str, int, float)) else ""


def decision(value: Any) -> str:
    """Return a decision: approved, rejected, or a custom word."""
    if isinstance(value, dict):
        for key in ("approved", "approval", "decision"):
            if key in value:
                return decision(value[key])
    if isinstance(value, str):
        word = value.strip().lower()
        return APPROVED if word in _YES else REJECTED if word in _NO else value
    if isinstance(value, (bool, int, float)) and value in (0, 1):  # some languages have no booleans
        return APPROVED if value else REJECTED
    raise ExpressionError(
        f"{value!r:.100} decides nothing: expected true or false, yes or no, approved or rejected, or the name of an "
        f"edge of the approval."
    )


def check_decision(flow: Flow, path: str, value: Any) -> str:
    """Return the decision of a value at the approval with this path. Raises ExpressionError if it decides nothing."""
    *above, key = path.split("/")
    inner: Flow | None = flow
    for outer in above:
        inner = inner.nodes[outer].subflow if inner is not None and outer in inner.nodes else None
    assert inner is not None, f"there is no node {path!r}"
    node = inner.nodes[key]
    action = action_of_approval(node, value)
    valid = {edge.action for edge in inner.edges if edge.source == key} | {APPROVED, REJECTED, node.post.action_static}
    if value is None or action not in valid:
        expected = ", ".join(sorted(valid - {"", DEFAULT, ERROR, TIMEOUT}))
        raise ExpressionError(f"{value!r:.100} decides nothing at approval {path!r}: expected one of {expected}.")
    if not node.post.action_static:
        return action
    try:
        return decision(value)
    except ExpressionError:
        return action


def action_of_approval(node: Node, value: Any) -> str:
    """Return the action of an approval from the decision."""
    if node.post.action_static:
        return node.post.action_static
    if node.post.action_key:
        source = {"approval": value, **(value if isinstance(value, dict) else {})}
        choice = part_of(source, node.post.action_key)
        if choice is not None:
            return decision(choice)
    return decision(value)
