"""A flow run the naive way: a loop in one thread, everything in memory, services called like functions.

What the planner does event by event, with a leader that forgets everything in between, must come to the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.domain.flow.definition import Exec, Flow, Node, Prep, Rule
from tests.unit.flows.made import SIGNALS

Service = Callable[[str, Any, dict[str, Any]], Any]
"""Takes its name, the input and the parameters; raises if it fails."""


class Failed(Exception):
    """A flow has failed."""


class TimedOut(Failed):
    """What a node waited for did not come."""


_DECISIONS = {"yes": "approved", "no": "rejected", "later": "a2"}


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

    def __init__(self, service: Service, most_steps: int, rule: Rule = "default") -> None:
        self.service = service
        self.rule = rule
        self.left = most_steps
        self.visited: list[tuple[str, str]] = []
        """Nodes, behind those above them, and how each visit ended."""

    def run(
        self, flow: Flow, params: dict[str, Any], outer: Any, path: str = "", execs: tuple[Exec, ...] = ()
    ) -> dict[str, Any]:
        """Return the shared state at the end."""
        shared: dict[str, Any] = {}
        key = flow.start
        edges = {(edge.source, edge.action): edge.to for edge in flow.edges}
        own = {one.node: one for one in execs}
        tried = 0
        while key:
            if not self.left:
                raise Failed("steps")
            self.left -= 1
            node = flow.nodes[key]
            merged = {**params, **node.params}
            given = self._input(node.prep, merged, shared, outer)
            status = "success"
            try:
                result = self._result(node, merged, given, path + key + "/", shared, outer, own.get(key))
                action = node.post.action_static or self._action(node, result, merged, shared, given)
                self._write(node, result, shared)
            except Failed as error:
                if str(error) == "steps":
                    raise
                status = "failed"
                if isinstance(error, TimedOut) and (key, "timeout") in edges:
                    action = "timeout"
                elif node.kind == "subflow" and tried < (node.max_retries or 0):
                    tried += 1
                    self.visited.append((path + key, status))
                    continue
                elif (
                    (key, "error") in edges
                    or node.on_error == "continue"
                    or (not node.on_error and self.rule == "default" and (key, "default") in edges)
                ):
                    shared["_error"] = True
                    action = "error"
                else:
                    self.visited.append((path + key, status))
                    raise Failed(str(error)) from error
            self.visited.append((path + key, status))
            tried = 0
            key = edges.get((key, action), edges.get((key, "default"), ""))
        return shared

    def _input(self, prep: Prep, params: dict[str, Any], shared: dict[str, Any], outer: Any) -> Any:
        if prep.input_map:
            return {name: get(path, params, shared, outer) for name, path in prep.input_map.items()}
        return get(prep.input_key, params, shared, outer) if prep.input_key else None

    def _write(self, node: Node, result: Any, shared: dict[str, Any]) -> None:
        if node.post.output_key:
            shared[node.post.output_key] = result
        for key, part in node.post.output_map.items():
            shared[key] = get("$input." + part, None, None, result)

    def _action(self, node: Node, result: Any, params: Any, shared: Any, given: Any) -> str:
        if node.kind == "approval":
            return _DECISIONS[node.params["approval_key"]]
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

    def _result(
        self, node: Node, params: dict[str, Any], given: Any, path: str, shared: Any, outer: Any, own: Exec | None
    ) -> Any:
        if node.kind in ("choice", "timer"):
            return given
        if node.kind in ("wait_event", "approval"):
            return self._signal(node, shared)
        if node.kind == "executor":
            name, more = (own.service, own.params) if own is not None else (node.service, {})
            return self._call(name, given, {**params, **more}, node.max_retries or 0)
        if node.kind == "subflow":
            assert node.subflow is not None
            return self.run(node.subflow, params, given, path, node.subflow_execs)
        if node.kind == "foreach":
            if not isinstance(given, list):
                raise Failed("no list")
            items = {one.index: one for one in node.foreach_execs}
            execs = [items.get(position, Exec()) for position in range(len(given))]
            calls = list(zip(execs, given, strict=True))
        else:
            execs = [*node.parallel_execs] or [Exec(service=name) for name in node.parallel_services]
            calls = [
                (one, self._input(one.prep, params, shared, outer) if one.prep.input_key else given) for one in execs
            ]
        return self._gather(node, params, calls, shared)

    def _signal(self, node: Node, shared: dict[str, Any]) -> Any:
        key = str(node.params.get("approval_key") or node.params["signal_key"]).removeprefix("$shared.")
        if key not in SIGNALS:
            if node.ignores_errors:
                return None
            raise TimedOut(key)
        if node.params["consume"]:
            shared[key] = None
        return SIGNALS[key]

    def _gather(self, node: Node, params: dict[str, Any], calls: list[tuple[Exec, Any]], shared: Any) -> list[Any]:
        values: list[Any] = []
        failed = False
        for one, item in calls:
            try:
                value = self._call(one.service or node.service, item, {**params, **one.params}, node.max_retries or 0)
                values.append(value)
                if one.post.output_key:
                    shared[one.post.output_key] = value
            except Failed:
                values.append(None)
                failed = True
                if node.failure_strategy == "fail_fast" and node.parallel_mode == "sequential":
                    break
        if failed and node.failure_strategy not in ("ignore_errors", "continue"):
            if node.failure_strategy == "collect_errors" and node.post.output_key:
                shared[node.post.output_key] = values
            raise Failed("a branch")
        return values
