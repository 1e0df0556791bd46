"""A worker that implements the services of the flow tests, and a flow with every kind of node."""

from __future__ import annotations

from typing import Any

from orchestrator.domain.tasks.task import Dispatch, Failed, Succeeded, TaskError
from orchestrator.sdk.flow.flows import FlowHandle
from orchestrator.sdk.values.payload import decode_call, encode_value
from tests.integration.stage import System, Worker

SERVICES = ("transform", "sum", "route", "flaky", "bad", "job", "limited")


def serve(name: str, input_value: Any, params: dict[str, Any]) -> Any:
    """Compute the result of a service."""
    if name == "transform":
        return input_value * params["mul"] if "mul" in params else getattr(input_value, params["op"])()
    if name == "sum":
        return sum(input_value)
    if name == "route":
        return {"action": params.get("action", "default")}
    raise ValueError(f"{name} says no")


class Stage:
    """A system with one worker that implements the services."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.worker: Worker = system.worker(knows=SERVICES, slots=100)
        self.calls: list[tuple[str, Any]] = []
        for name in {*SERVICES} - {*system.app.tasks, "limited"}:
            system.app.task(name=name)(lambda params: params)
        self.failures = 0
        """How often `flaky` fails before it succeeds."""
        system.settle()

    def work(self) -> int:
        """Run all dispatched tasks; return their number."""
        taken = self.worker.take()
        self.worker.report(*(self._answer(task) for task in taken)) if taken else None
        return len(taken)

    def _answer(self, task: Dispatch) -> Succeeded | Failed:
        _, keywords, _ = decode_call(task.payload)
        self.calls.append((task.name, keywords["input"]))
        try:
            if task.name == "flaky" and self.failures <= 0:
                value: Any = "worked"
            else:
                self.failures -= task.name == "flaky"
                value = serve(task.name, keywords["input"], keywords["params"])
        except Exception as error:  # noqa: BLE001  # as a worker does
            return Failed(task.id, task.attempt, 0.01, TaskError(type(error).__name__, str(error)))
        return Succeeded(task.id, task.attempt, 0.01, encode_value(value, "it", 1_000_000))

    def run(self, handle: FlowHandle, times: int = 40) -> str:
        """Tick and run tasks until the run has ended or `times` is reached; return its state."""
        for _ in range(times):
            self.system.pass_seconds(after=0.01)
            self.work()
            state = handle.status()
            if state not in ("pending", "running"):
                return state
        return handle.status()

    def later(self, seconds: float) -> None:
        """Fail over to a leader whose clock is `seconds` ahead."""
        self.system.lead(offset=seconds)
        self.worker.beat()
        self.system.settle()


EVERY_KIND: dict[str, Any] = {
    "start": "double",
    "nodes": {
        "double": {
            "kind": "executor",
            "exec_type": "local_func",
            "service": "transform",
            "params": {"mul": 2},
            "prep": {"input_key": "$params.val"},
            "post": {"output_key": "doubled"},
        },
        "large": {
            "kind": "choice",
            "choice_cases": [{"action": "ask", "expr": {"gt": ["$shared.doubled", 10]}}],
            "default_action": "go",
        },
        "ask": {"kind": "approval", "params": {"approval_key": "$shared.ok"}},
        "both": {
            "kind": "parallel",
            "exec_type": "local_func",
            "parallel_services": ["transform", "transform"],
            "parallel_mode": "concurrent",
            "params": {"mul": 3},
            "prep": {"input_key": "doubled"},
            "post": {"output_key": "both"},
        },
        "each": {
            "kind": "foreach",
            "exec_type": "local_func",
            "service": "transform",
            "params": {"mul": 10},
            "prep": {"input_key": "$shared.both"},
            "post": {"output_key": "each"},
        },
        "pause": {"kind": "timer", "params": {"delay_ms": 60_000}},
        "wait": {"kind": "wait_event", "params": {"signal_key": "$shared.flag", "timeout_ms": 3_600_000}},
        "inner": {
            "kind": "subflow",
            "post": {"output_key": "inner"},
            "subflow": {
                "start": "total",
                "nodes": {
                    "total": {
                        "kind": "executor",
                        "exec_type": "local_func",
                        "service": "sum",
                        "prep": {"input_key": "$input"},
                        "post": {"output_key": "total"},
                    }
                },
            },
            "prep": {"input_key": "$shared.each"},
        },
    },
    "edges": [
        {"from": "double", "action": "default", "to": "large"},
        {"from": "large", "action": "ask", "to": "ask"},
        {"from": "large", "action": "go", "to": "both"},
        {"from": "ask", "action": "approved", "to": "both"},
        {"from": "both", "action": "default", "to": "each"},
        {"from": "each", "action": "default", "to": "pause"},
        {"from": "pause", "action": "default", "to": "wait"},
        {"from": "wait", "action": "default", "to": "inner"},
    ],
}
"""Every kind of node. Results with `val` 2: 4, [12, 12], [120, 120], 240."""
