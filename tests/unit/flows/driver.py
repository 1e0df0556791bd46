"""A leader that consists of the flow planner only, and keeps no memory between two events."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from orchestrator.domain import timezones
from orchestrator.domain.flow import commands
from orchestrator.domain.flow.commands import NodeRun
from orchestrator.domain.flow.definition import Flow, Rule
from orchestrator.domain.flow.graph import Graph
from orchestrator.domain.flow.plan import Planner
from orchestrator.domain.flow.state import FlowState, Wait


class Driver:
    """Runs one flow. Tasks end in random order, and the state is encoded and decoded after every event."""

    def __init__(
        self,
        flow: Flow,
        params: dict[str, Any],
        service: Callable[[str, Any, dict[str, Any]], Any],
        rule: Rule = "default",
    ) -> None:
        self.graph = Graph(flow, rule)
        self.params = params
        self.service = service
        self.now = 1_000.0
        self.calls: dict[bytes, commands.Call] = {}
        self.timers: dict[bytes, float] = {}
        self.visits: list[NodeRun] = []
        self.signals: dict[str, Any] = {}
        """Values of signals by key; each is sent when the run waits for its key."""
        self.end: commands.End | None = None
        self.largest = 0
        self._data = timezones.encode(FlowState().to_plain())

    @property
    def state(self) -> FlowState:
        return FlowState.from_plain(timezones.decode(self._data))

    def planner(self, state: FlowState) -> Planner:
        """Return a planner for a state."""
        return Planner(self.graph, self.params, state, self.now, lambda number: number.to_bytes(16, "big"))

    def tell(self, event: commands.Event) -> None:
        """Pass an event to a new planner, as a leader does after a failover; apply its commands."""
        assert self.end is None, "it has ended"
        state = self.state
        for command in self.planner(state).handle(event):
            match command:
                case commands.Call(id=id):
                    assert id not in self.calls
                    self.calls[id] = command
                case commands.CancelCalls(ids=ids):
                    assert all(one in self.calls for one in ids)
                case commands.StartTimer(id=id, due=due):
                    self.timers[id] = due
                case commands.CancelTimer(id=id):
                    del self.timers[id]
                case commands.NodeRun():
                    self.visits.append(command)
                case commands.End():
                    self.end = command
        self._data = timezones.encode(state.to_plain())
        self.largest = max(self.largest, len(self._data))

    def step(self, choose: random.Random) -> bool:
        """Run the next event: end a task, send a signal or fire a timer. Return False if none is possible."""
        if self.end is not None:
            return False
        if self.calls:
            identifier = choose.choice(sorted(self.calls))
            call = self.calls.pop(identifier)
            if identifier in self.state.closing:
                self.tell(commands.CallEnded(identifier, error="cancelled"))
                return True
            try:
                ended = commands.CallEnded(identifier, self._call_with_retries(call))
            except ValueError as error:
                ended = commands.CallEnded(identifier, error=str(error))
            self.tell(ended)
            if choose.random() < 0.2 and self.end is None:
                self.tell(ended)  # a duplicate report
            return True
        work = self.state.work
        key = work.key.rpartition("/")[2] if isinstance(work, Wait) and work.what == "signal" else ""
        if isinstance(work, Wait) and key in self.signals:
            self.tell(commands.Signalled(choose.choice([key, work.key]), self.signals[key]))
            return True
        if self.timers:
            timer = min(self.timers, key=lambda one: self.timers[one])
            self.now = max(self.now, self.timers.pop(timer))
            self.tell(commands.TimerFired(timer))
            return True
        return False

    def _call_with_retries(self, call: commands.Call) -> Any:
        """Call the service with the retries of a task."""
        for attempt in range((call.node.max_retries or 0) + 1):
            try:
                return self.service(call.exec.service or call.exec.func, call.input, call.params)
            except ValueError:
                if attempt == (call.node.max_retries or 0):
                    raise
        raise AssertionError

    def run(self, seed: int = 0, max_events: int = 100_000) -> FlowState:
        """Run until the flow has ended or waits for an external event."""
        choose = random.Random(seed)
        for key, value in self.signals.items():
            if choose.random() < 0.3:
                self.tell(commands.Signalled(key, value))
        self.tell(commands.Begun())
        for _ in range(max_events):
            if not self.step(choose):
                break
        return self.state
