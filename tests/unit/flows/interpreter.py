"""A flow run the naive way: a loop in one thread, everything in memory, services called like functions.

What the planner does event by event, with a leader that forgets everything in between, must come to the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.domain.flow.definition import Flow, Node

Service = Callable[[str, Any, dict[str, Any]], Any]
"""Takes its name, the input and the parameters; raises if it fails."""


class Failed(Exception):
    """A flow has failed."""


def get(path: str, params: Any, shared: Any, given: Any) -> Any:
    """Look a path up, one character after another."""
    roots = {"$params": params, "$shared": shared, "$input": given}
    words = path.replace("[", ".[").split(".")
    value = roots[words.pop(0)] if path.startswith("$") else shared
    for word in words:
        try:
            value = value[int(word[1:-1])] if word.startswith("[") else value[word]
        except (KeyError, IndexError, TypeError):
            return None
    return value


class Interpreter:
    """Runs one flow."""

    def __init__(self, service: Service, most_steps: int) -> None:
        self.service = service
        self.left = most_steps
        self.visited: list[tuple[str, str]] = []

    def run(self, flow: Flow, params: dict[str, Any], outer: Any, path: str = "") -> dict[str, Any]:
        """Return the shared state at the end."""
        shared: dict[str, Any] = {}
        key = flow.start
        edges = {(edge.source, edge.action): edge.to for edge in flow.edges}
        while key:
            if not self.left:
                raise Failed("steps")
            self.left -= 1
            node = flow.nodes[key]
            merged = {**params, **node.params}
            given = self._input(node, merged, shared, outer)
            try:
                result = self._result(node, merged, given, path + key + "/")
                action = node.post.action_static or self._action(node, result, merged, shared, given)
                if node.post.output_key:
                    shared[node.post.output_key] = result
                status = "success"
            except Failed as error:
                if str(error) == "steps":
                    raise
                status = "failed"
                if (key, "error") not in edges and (key, "default") not in edges:
                    self.visited.append((path + key, status))
                    raise
                shared["_error"] = True
                action = "error"
            self.visited.append((path + key, status))
            key = edges.get((key, action), edges.get((key, "default"), ""))
        return shared

    def _input(self, node: Node, params: dict[str, Any], shared: dict[str, Any], outer: Any) -> Any:
        return get(node.prep.input_key, params, shared, outer) if node.prep.input_key else None

    def _action(self, node: Node, result: Any, params: Any, shared: Any, given: Any) -> str:
        for case in node.choice_cases:
            ((operator, (left, right)),) = case.expr.items()
            value = get(left, params, shared, given)
            if {"eq": value == right, "ne": value != right}[operator]:
                return case.action
        if node.post.action_key and isinstance(result, dict):
            return str(result.get(node.post.action_key) or node.default_action or "default")
        return node.default_action or "default"

    def _call(self, name: str, given: Any, params: dict[str, Any], tries: int) -> Any:
        for attempt in range(tries + 1):
            try:
                return self.service(name, given, params)
            except ValueError as error:
                if attempt == tries:
                    raise Failed(str(error)) from error
        raise AssertionError

    def _result(self, node: Node, params: dict[str, Any], given: Any, path: str) -> Any:
        if node.kind in ("choice", "timer"):
            return given
        if node.kind == "executor":
            return self._call(node.service, given, params, node.max_retries)
        if node.kind == "subflow":
            assert node.subflow is not None
            return self.run(node.subflow, params, given, path)
        if node.kind == "foreach":
            if not isinstance(given, list):
                raise Failed("no list")
            calls = [(node.service, item) for item in given]
        else:
            calls = [(service, given) for service in node.parallel_services]
        values: list[Any] = []
        failed = False
        for name, item in calls:
            try:
                values.append(self._call(name, item, params, node.max_retries))
            except Failed:
                values.append(None)
                failed = True
                if node.failure_strategy == "fail_fast" and node.parallel_mode == "sequential":
                    break
        if failed and node.failure_strategy not in ("ignore_errors", "continue"):
            raise Failed("a branch")
        return values
