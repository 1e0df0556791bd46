"""Build flow graphs in Python. The result equals the data in a file.

order = FlowGraph(start="price") order.executor("price", run=price, input="$params.items", output="total", to="large")
order.choice("large", cases={"ask": {"gt": ["$shared.total", 1000]}}, to={"ask": "ask", "default": "ship"})
order.approval("ask", to={"approved": "ship"}) order.executor("ship", run=ship, input="$shared.total")
app.flows.publish("order", order)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.domain.flow.definition import DEFAULT, Flow
from orchestrator.errors import InvalidWorkflow
from orchestrator.sdk.tasks.task import Task

Runs = Task[..., Any] | str
"""A task of the application, or the name of a service."""
To = str | Mapping[str, str]
"""The successors of a node: a single node, or one per action."""


class FlowGraph:
    """Builds a flow graph. The graph is checked when it is read or published.

    Args:
        start: The first node.
        max_steps: The maximum number of nodes that a run visits.
        description: A description for readers.
        schedule: The schedule of the flow, as in a file: `{"every": "1h"}`.
    """

    def __init__(
        self, start: str, *, max_steps: int = 0, description: str = "", schedule: Mapping[str, Any] | None = None
    ) -> None:
        self._start = start
        self._nodes: dict[str, dict[str, Any]] = {}
        self._edges: list[dict[str, str]] = []
        self._rest = {"max_steps": max_steps, "description": description, "schedule": dict(schedule or {})}

    def node(self, key: str, kind: str, *, to: To | None = None, **fields: Any) -> FlowGraph:
        """Add a node of any kind, with the fields that it has in a file."""
        if key in self._nodes:
            raise InvalidWorkflow(f"There are two nodes {key!r}. Give one of them a different key.")
        self._nodes[key] = {"kind": kind, **{name: value for name, value in fields.items() if value not in (None, "")}}
        targets = {DEFAULT: to} if isinstance(to, str) else dict(to or {})
        for action, target in targets.items():
            self.edge(key, target, action=action)
        return self

    def edge(self, source: str, to: str, *, action: str = DEFAULT) -> FlowGraph:
        """Add an edge: an action of the node `source` leads to the node `to`."""
        self._edges.append({"from": source, "action": action, "to": to})
        return self

    def executor(
        self,
        key: str,
        *,
        run: Runs,
        input: str | Mapping[str, str] = "",
        output: str = "",
        action_key: str = "",
        to: To | None = None,
        **fields: Any,
    ) -> FlowGraph:
        """Add a node that runs a task or a service."""
        fields = {**_runs(run), **_prep(input), **_post(output, action_key), **fields}
        return self.node(key, "executor", to=to, **fields)

    def choice(
        self,
        key: str,
        *,
        cases: Mapping[str, Any],
        default: str = "",
        input: str | Mapping[str, str] = "",
        to: To | None = None,
    ) -> FlowGraph:
        """Add a node that ends with the first action whose expression is true."""
        listed = [{"action": action, "expr": expr} for action, expr in cases.items()]
        return self.node(key, "choice", to=to, choice_cases=listed, default_action=default, **_prep(input))

    def parallel(
        self,
        key: str,
        *,
        run: Sequence[Runs],
        input: str | Mapping[str, str] = "",
        output: str = "",
        concurrent: bool = True,
        to: To | None = None,
        **fields: Any,
    ) -> FlowGraph:
        """Add a node that runs several tasks or services with the same input."""
        fields = {**_prep(input), **_post(output), **fields}
        mode = "concurrent" if concurrent else "sequential"
        return self.node(
            key, "parallel", to=to, parallel_execs=[_runs(target) for target in run], parallel_mode=mode, **fields
        )

    def foreach(
        self,
        key: str,
        *,
        run: Runs,
        input: str,
        output: str = "",
        concurrent: bool = True,
        to: To | None = None,
        **fields: Any,
    ) -> FlowGraph:
        """Add a node that runs a task or a service for each item of a list."""
        fields = {**_runs(run), **_prep(input), **_post(output), **fields}
        mode = "concurrent" if concurrent else "sequential"
        return self.node(key, "foreach", to=to, parallel_mode=mode, **fields)

    def subflow(
        self,
        key: str,
        flow: FlowGraph | str,
        *,
        version: int | None = None,
        input: str | Mapping[str, str] = "",
        output: str = "",
        to: To | None = None,
        **fields: Any,
    ) -> FlowGraph:
        """Add a node that runs another flow: a flow graph, or the name of a published flow."""
        inner: Any = {"flow": flow, "version": version} if isinstance(flow, str) else flow.to_data()
        return self.node(key, "subflow", to=to, subflow=inner, **{**_prep(input), **_post(output), **fields})

    def timer(self, key: str, *, seconds: float, to: To | None = None) -> FlowGraph:
        """Add a node that waits for some seconds."""
        return self.node(key, "timer", to=to, params={"delay_ms": round(seconds * 1000)})

    def wait_event(
        self,
        key: str,
        *,
        signal: str,
        timeout: float | None = None,
        output: str = "",
        to: To | None = None,
        **fields: Any,
    ) -> FlowGraph:
        """Add a node that waits for a signal."""
        params = {"signal_key": signal, **_timeout(timeout), **fields.pop("params", {})}
        return self.node(key, "wait_event", to=to, params=params, **{**_post(output), **fields})

    def approval(
        self,
        key: str,
        *,
        signal: str = "",
        timeout: float | None = None,
        output: str = "",
        to: To | None = None,
        **fields: Any,
    ) -> FlowGraph:
        """Add a node that waits for an approval or a rejection."""
        params = {**({"approval_key": signal} if signal else {}), **_timeout(timeout), **fields.pop("params", {})}
        return self.node(key, "approval", to=to, params=params, **{**_post(output), **fields})

    def to_data(self) -> dict[str, Any]:
        """Return the flow as plain data with the structure of a file."""
        rest = {name: value for name, value in self._rest.items() if value}
        return {"start": self._start, "nodes": dict(self._nodes), "edges": list(self._edges), **rest}

    def definition(self) -> Flow:
        """Return the flow, or raise InvalidWorkflow with all its problems."""
        from orchestrator.sdk.flow import reading  # loads the YAML parser, which workers do without

        return reading.from_data(self.to_data())


def _runs(run: Runs) -> dict[str, Any]:
    if isinstance(run, str):
        return {"service": run}
    if run._is_via:
        raise InvalidWorkflow(f"A node runs task {run.name!r} where its flow runs. Leave out the task's via(…).")
    return {"exec_type": "local_func", "func": run.name}


def _prep(input: str | Mapping[str, str]) -> dict[str, Any]:
    if not input:
        return {}
    return {"prep": {"input_key": input} if isinstance(input, str) else {"input_map": dict(input)}}


def _post(output: str, action_key: str = "") -> dict[str, Any]:
    fields = {name: text for name, text in (("output_key", output), ("action_key", action_key)) if text}
    return {"post": fields} if fields else {}


def _timeout(seconds: float | None) -> dict[str, Any]:
    return {} if seconds is None else {"timeout_ms": round(seconds * 1000)}
