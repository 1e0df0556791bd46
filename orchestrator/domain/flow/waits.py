"""Nodes of flows that wait for a timer, a signal or an approval; and early signals."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from orchestrator.domain.flow import commands
from orchestrator.domain.flow.cursor import CurrentNode, Cursor
from orchestrator.domain.flow.decisions import action_of_approval
from orchestrator.domain.flow.definition import MOST_MS, TIMEOUT
from orchestrator.domain.flow.expression import is_path
from orchestrator.domain.flow.graph import signal_path
from orchestrator.domain.flow.paths import Path, find, parse, resolve, write
from orchestrator.domain.flow.state import Calls, Wait
from orchestrator.errors import ExpressionError


class Waiting(Cursor):
    """Has the node at which the cursor stands wait for what no task does."""

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
            self.keep(event)
            return
        try:
            key = parse(event.key).key
        except ExpressionError:  # no node can wait for it
            return
        work = state.work
        current = self._current() if isinstance(work, Wait) and work.what == "signal" else None
        is_asked = current is not None and current.node.kind == "approval" and not event.key.startswith("$")
        if is_asked and current is not None and key == self._expected(current).key:
            key = self._address(current)  # a client of the previous release leaves that to the leader
        if self._is_decided(key):
            return
        if isinstance(work, Calls) and work.is_looked_up:
            work.input, work.is_looked_up = self._given(self._current(), work), False
        self._keep(key, event)
        if current is not None and isinstance(work, Wait):
            value = self._awaited(current, work.input)
            if value is not None:
                self._stop_waiting(work)
                self._met(current, work.input, value)

    def keep(self, event: commands.Signalled) -> None:
        """Keep a signal that comes when the flow is over: a retry has it, and what a run came to stays as it is."""
        with suppress(ExpressionError):
            key = parse(event.key).key
            if not self._is_decided(key):
                self._keep(key, event)

    def _is_decided(self, key: str) -> bool:
        """Say whether this is an approval that is decided, and stays so."""
        return key in self._graph.asked and key in self._state.deciders and key not in self._graph.consumed

    def _keep(self, key: str, event: commands.Signalled) -> None:
        state = self._state
        if event.value is None:
            for kept in (state.signals, state.deciders, state.queued):
                kept.pop(key, None)
            self._show(key, None)
        elif key in self._graph.consumed and key in state.signals:
            state.queued.setdefault(key, []).append((event.value, event.by, self._now, event.why))
        else:
            state.signals[key] = event.value
            state.deciders[key] = (event.by, self._now, event.why)
            self._show(key, event.value)

    def _show(self, key: str, value: Any) -> None:
        """Write a signal into the shared state of the run; a decision for a flow below is none of that one's."""
        is_result = self._state.is_over and self._state.error is None
        if self._state.frames and not is_result and key not in self._graph.asked_below:
            _note(self._state.shared, key, value)

    def _start_timer(self, current: CurrentNode, given: Any) -> None:
        delay = self._number(current, given, "delay_ms")
        if delay is None:
            self._fail(given, "A timer takes the number params.delay_ms.")
        elif delay <= 0:
            self._finish(given, given)
        else:
            self._wait(Wait("timer", given), self._now + delay / 1000)

    def _wait_for_signal(self, current: CurrentNode, given: Any) -> None:
        timeout = self._number(current, given, "timeout_ms")
        if current.node.kind == "approval":
            self._state.deciders.pop(self._address(current), None)  # it was of an earlier visit
        wait = Wait("signal", given, key=self._address(current))
        if timeout is not None and timeout > 0:
            self._wait(wait, self._now + timeout / 1000)
        else:
            self._state.work = wait

    def _expected(self, current: CurrentNode) -> Path:
        """Return where a node looks for the signal that it waits for."""
        return signal_path(current.frame.node, current.node)

    def _address(self, current: CurrentNode) -> str:
        """Return what the signal is called that a node waits for: of an approval, with the nodes above it."""
        key = self._expected(current).key
        above = [frame.node for frame in self._state.frames[:-1]]
        return "/".join([*above, key]) if current.node.kind == "approval" else key

    def _awaited(self, current: CurrentNode, given: Any) -> Any:
        """Return what a node waits for, if it is there: in the data of the run, or as a signal that was sent."""
        value = resolve(self._expected(current), current.names(given))
        value = self._state.signals.get(self._address(current)) if value is None else value
        return None if value == "" and current.node.kind == "approval" else value

    def _met(self, current: CurrentNode, given: Any, value: Any) -> None:
        """End a node whose signal is there."""
        address = self._address(current)
        by, at, why = self._state.deciders.get(address, ("", self._now, ""))
        if current.node.params.get("consume"):
            self._consume(current, address)
        elif address in self._graph.asked_below and self._state.signals.pop(address, None) is not None:
            _note(current.frame.shared, self._expected(current).key, value)
        if current.node.kind != "approval":
            self._finish(given, value)
            return
        if not current.node.params.get("consume"):
            self._state.deciders[address] = (by, at, why)
        shown = {"approval": value, "by": by, "at": at, "why": why}
        self._finish(given, value, action=action_of_approval(current.node, value), shown=shown)

    def _consume(self, current: CurrentNode, address: str) -> None:
        """Take a signal away, so that the next one that was sent stands in its current."""
        state = self._state
        state.signals.pop(address, None)
        state.deciders.pop(address, None)
        self._show(address, None)
        _note(current.frame.shared, self._expected(current).key, None)
        if queue := state.queued.pop(address, []):
            value, by, at, why = queue[0]
            state.signals[address], state.deciders[address] = value, (by, at, why)
            if queue[1:]:
                state.queued[address] = queue[1:]
            self._show(address, value)

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

    def _number(self, current: CurrentNode, given: Any, name: str) -> float | None:
        value = current.node.params.get(name)  # those of the run are what it works on, and do not say how
        value = find(str(value), current.names(given)) if is_path(value) else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        if not value <= MOST_MS:
            raise ExpressionError(
                f"params.{name} is at most {MOST_MS:,} milliseconds, a hundred years; found {value:,}."
            )
        return float(value)


def _note(shared: dict[str, Any], key: str, value: Any) -> None:
    """Write a signal into a shared state, if it fits there; a wait finds it anyway."""
    with suppress(ExpressionError):
        write(shared, key, value)
