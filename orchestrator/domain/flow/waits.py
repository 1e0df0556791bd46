"""Nodes that wait for a timer, a signal or an approval, and signals that arrive early."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from orchestrator.domain.flow import commands
from orchestrator.domain.flow.cursor import CurrentNode, Cursor
from orchestrator.domain.flow.decisions import action_of_approval
from orchestrator.domain.flow.definition import MAX_MS, TIMEOUT
from orchestrator.domain.flow.expression import is_path
from orchestrator.domain.flow.graph import signal_path
from orchestrator.domain.flow.paths import Path, find, parse, resolve, write
from orchestrator.domain.flow.state import Calls, Wait
from orchestrator.errors import ExpressionError


class Waiting(Cursor):
    """Lets the current node wait for timers and signals."""

    def _timer_fired(self, timer: bytes) -> None:
        work = self._state.work
        if not isinstance(work, Wait) or work.timer != timer:
            return
        self._state.work = None
        if work.what == "timer":
            self._finish(work.input, work.input)
        elif work.what == "signal":
            self._timed_out(work)

    def _signalled(self, event: commands.Signalled) -> None:
        state = self._state
        if state.is_over:
            self.keep_signal(event)
            return
        try:
            key = parse(event.key).key
        except ExpressionError:  # no node can wait for this key
            return
        work = state.work
        current = self._current() if isinstance(work, Wait) and work.what == "signal" else None
        is_approval = current is not None and current.node.kind == "approval" and not event.key.startswith("$")
        if is_approval and current is not None and key == self._signal_path(current).key:
            key = self._address(current)  # clients of the previous release send the key alone
        if self._is_decided(key):
            return
        if isinstance(work, Calls) and work.recomputes_input:
            work.input, work.recomputes_input = self._call_input(self._current(), work), False
        self._keep(key, event)
        if current is not None and isinstance(work, Wait):
            value = self._find_signal(current, work.input)
            if value is not None:
                self._stop_waiting(work)
                self._receive(current, work.input, value)

    def keep_signal(self, event: commands.Signalled) -> None:
        """Store a signal that arrives after the flow has ended, for a retry. The result of the run does not change."""
        with suppress(ExpressionError):
            key = parse(event.key).key
            if not self._is_decided(key):
                self._keep(key, event)

    def _is_decided(self, key: str) -> bool:
        """Return whether the key belongs to an approval whose decision is final."""
        return key in self._graph.approval_keys and key in self._state.deciders and key not in self._graph.consumed_keys

    def _keep(self, key: str, event: commands.Signalled) -> None:
        state = self._state
        if event.value is None:
            for signals in (state.signals, state.deciders, state.queued):
                signals.pop(key, None)
            self._share_signal(key, None)
        elif key in self._graph.consumed_keys and key in state.signals:
            state.queued.setdefault(key, []).append((event.value, event.by, self._now, event.why))
        else:
            state.signals[key] = event.value
            state.deciders[key] = (event.by, self._now, event.why)
            self._share_signal(key, event.value)

    def _share_signal(self, key: str, value: Any) -> None:
        """Write a signal to the shared state of the run. Decisions for approvals in subflows are left out."""
        is_result = self._state.is_over and self._state.error is None
        if self._state.frames and not is_result and key not in self._graph.inner_approval_keys:
            _write_signal(self._state.shared, key, value)

    def _start_timer(self, current: CurrentNode, node_input: Any) -> None:
        delay = self._number(current, node_input, "delay_ms")
        if delay is None:
            self._fail(node_input, "A timer takes the number params.delay_ms.")
        elif delay <= 0:
            self._finish(node_input, node_input)
        else:
            self._wait(Wait("timer", node_input), self._now + delay / 1000)

    def _wait_for_signal(self, current: CurrentNode, node_input: Any) -> None:
        timeout = self._number(current, node_input, "timeout_ms")
        if current.node.kind == "approval":
            self._state.deciders.pop(self._address(current), None)  # from an earlier visit
        wait = Wait("signal", node_input, key=self._address(current))
        if timeout is not None and timeout > 0:
            self._wait(wait, self._now + timeout / 1000)
        else:
            self._state.work = wait

    def _signal_path(self, current: CurrentNode) -> Path:
        return signal_path(current.frame.node, current.node)

    def _address(self, current: CurrentNode) -> str:
        """Return the key of the signal that the node waits for. Keys of approvals include the nodes above."""
        key = self._signal_path(current).key
        above = [frame.node for frame in self._state.frames[:-1]]
        return "/".join([*above, key]) if current.node.kind == "approval" else key

    def _find_signal(self, current: CurrentNode, node_input: Any) -> Any:
        """Return the awaited value from the data of the run or from a signal. None if there is none yet."""
        value = resolve(self._signal_path(current), current.names(node_input))
        value = self._state.signals.get(self._address(current)) if value is None else value
        return None if value == "" and current.node.kind == "approval" else value

    def _receive(self, current: CurrentNode, node_input: Any, value: Any) -> None:
        address = self._address(current)
        by, at, why = self._state.deciders.get(address, ("", self._now, ""))
        if current.node.params.get("consume"):
            self._consume(current, address)
        elif address in self._graph.inner_approval_keys and self._state.signals.pop(address, None) is not None:
            _write_signal(current.frame.shared, self._signal_path(current).key, value)
        if current.node.kind != "approval":
            self._finish(node_input, value)
            return
        if not current.node.params.get("consume"):
            self._state.deciders[address] = (by, at, why)
        recorded = {"approval": value, "by": by, "at": at, "why": why}
        self._finish(node_input, value, action=action_of_approval(current.node, value), recorded_output=recorded)

    def _consume(self, current: CurrentNode, address: str) -> None:
        """Remove a signal and make the next one in the queue current."""
        state = self._state
        state.signals.pop(address, None)
        state.deciders.pop(address, None)
        self._share_signal(address, None)
        _write_signal(current.frame.shared, self._signal_path(current).key, None)
        if queue := state.queued.pop(address, []):
            value, by, at, why = queue[0]
            state.signals[address], state.deciders[address] = value, (by, at, why)
            if queue[1:]:
                state.queued[address] = queue[1:]
            self._share_signal(address, value)

    def _timed_out(self, work: Wait) -> None:
        current = self._current()
        if current.node.ignores_errors:
            self._finish(work.input, None)
            return
        waited = self._now - current.frame.entered
        error = f"Nobody sent {work.key!r} within {waited:.3g} s."
        if current.graph.edges.catches(current.frame.node, TIMEOUT):
            self._record(current, "failed", work.input, None, TIMEOUT, error)
            self._follow(current, TIMEOUT)
        else:
            self._fail(work.input, error)

    def _number(self, current: CurrentNode, node_input: Any, name: str) -> float | None:
        value = current.node.params.get(name)  # only the node's own parameters, not those of the run
        value = find(str(value), current.names(node_input)) if is_path(value) else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        if not value <= MAX_MS:
            raise ExpressionError(
                f"params.{name} is at most {MAX_MS:,} milliseconds, a hundred years; found {value:,}."
            )
        return float(value)


def _write_signal(shared: dict[str, Any], key: str, value: Any) -> None:
    """Write a signal to a shared state if its key fits there. A waiting node finds the signal in any case."""
    with suppress(ExpressionError):
        write(shared, key, value)
