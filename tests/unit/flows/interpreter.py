"""A naive interpreter of flows: one loop, all state in memory, services called as functions.

The planner handles one event at a time, with a leader that forgets everything in between. Both must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.domain.flow.definition import Exec, Flow, Node, Prep, Rule
from tests.unit.flows.made import SIGNALS

Service = Callable[[str, Any, dict[str, Any]], Any]
"""Takes the service's name, the input and the parameters; raises an error if the call fails."""


class Failed(Exception):
    """A flow failed."""


class TimedOut(Failed):
    """A node's wait timed out."""


_DECISIONS = {"yes": "approved", "no": "rejected", "later": "a2"}


def get(path: str, params: Any, shared: Any, input_value: Any) -> Any:
    """Resolve a path; return None if it does not exist."""
    roots = {"$params": params, "$shared": shared, "$input": input_value}
    parts = path.replace("[", ".[").split(".")
    value = roots[parts.pop(0)] if path.startswith("$") else shared
    for word in parts:
        try:
            value = value[int(word[1:-1])] if word.startswith("[") else value[word]
        except (KeyError, IndexError, TypeError):
            return None
    return value


class Interpreter:
    def __init__(self, service: Service, most_steps: int, rule: Rule = "default") -> None:
        self.service = service
        self.rule = rule
        self.steps_left = most_steps
        self.visited: list[tuple[str, str]] = []
        """The path of each visited node, including its parents, and the status of the visit."""

    def run(
        self, flow: Flow, params: dict[str, Any], outer: Any, path: str = "", execs: tuple[Exec, ...] = ()
    ) -> dict[str, Any]:
        shared: dict[str, Any] = {}
        key = flow.start
        edges = {(edge.source, edge.action): edge.to for edge in flow.edges}
        own = {entry.node: entry for entry in execs}
        retries = 0
        while key:
            if not self.steps_left:
                raise Failed("steps")
            self.steps_left -= 1
            node = flow.nodes[key]
            merged = {**params, **node.params}
            input_value = self._input(node.prep, merged, shared, outer)
            status = "success"
            try:
                result = self._result(node, merged, input_value, path + key + "/", shared, outer, own.get(key))
                action = node.post.action_static or self._action(node, result, merged, shared, input_value)
                self._write(node, result, shared)
            except Failed as error:
                if str(error) == "steps":
                    raise
                status = "failed"
                if isinstance(error, TimedOut) and (key, "timeout") in edges:
                    action = "timeout"
                elif node.kind == "subflow" and retries < (node.max_retries or 0):
                    retries += 1
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
            retries = 0
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

    def _action(self, node: Node, result: Any, params: Any, shared: Any, input_value: Any) -> str:
        if node.kind == "approval":
            return _DECISIONS[node.params["approval_key"]]
        for case in node.choice_cases:
            ((operator, (steps_left, right)),) = case.expr.items()
            value = get(steps_left, params, shared, input_value)
            if {"eq": value == right, "ne": value != right}[operator]:
                return case.action
        if node.post.action_key and isinstance(result, dict):
            return str(result.get(node.post.action_key) or node.default_action or "default")
        return node.default_action or "default"

    def _call(self, name: str, input_value: Any, params: dict[str, Any], tries: int) -> Any:
        for attempt in range(tries + 1):
            try:
                return self.service(name, input_value, params)
            except ValueError as error:
                if attempt == tries:
                    raise Failed(str(error)) from error
        raise AssertionError

    def _result(
        self, node: Node, params: dict[str, Any], input_value: Any, path: str, shared: Any, outer: Any, own: Exec | None
    ) -> Any:
        if node.kind in ("choice", "timer"):
            return input_value
        if node.kind in ("wait_event", "approval"):
            return self._signal(node, shared)
        if node.kind == "executor":
            name, more = (own.service, own.params) if own is not None else (node.service, {})
            return self._call(name, input_value, {**params, **more}, node.max_retries or 0)
        if node.kind == "subflow":
            assert node.subflow is not None
            return self.run(node.subflow, params, input_value, path, node.subflow_execs)
        if node.kind == "foreach":
            if not isinstance(input_value, list):
                raise Failed("no list")
            items = {entry.index: entry for entry in node.foreach_execs}
            execs = [items.get(position, Exec()) for position in range(len(input_value))]
            calls = list(zip(execs, input_value, strict=True))
        else:
            execs = [*node.parallel_execs] or [Exec(service=name) for name in node.parallel_services]
            calls = [
                (entry, self._input(entry.prep, params, shared, outer) if entry.prep.input_key else input_value)
                for entry in execs
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
        for entry, item in calls:
            try:
                value = self._call(
                    entry.service or node.service, item, {**params, **entry.params}, node.max_retries or 0
                )
                values.append(value)
                if entry.post.output_key:
                    shared[entry.post.output_key] = value
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
