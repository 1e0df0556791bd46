"""The planner of flows: `(definition, state, event) → commands`.

A run has one cursor. It stands at a node that waits for tasks, a timer or a signal; when that comes, the node ends with
an action, and the cursor goes on along its edge, through all nodes that need not wait. In a node that is a flow
itself, the cursor goes down a level, and comes up again when that flow ends. Nothing is read here, and nothing is known
that is not in the state: so a leader may forget it all between any two events.

This file takes events and visits nodes; `cursor` moves from node to node, `calls` and `waits` are what nodes wait for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from orchestrator.domain.flow import commands
from orchestrator.domain.flow.calls import Calling
from orchestrator.domain.flow.commands import Command, Event
from orchestrator.domain.flow.cursor import CurrentNode
from orchestrator.domain.flow.decisions import fallback_of
from orchestrator.domain.flow.expression import evaluate
from orchestrator.domain.flow.graph import branches
from orchestrator.domain.flow.paths import find
from orchestrator.domain.flow.state import Calls, Frame, Wait
from orchestrator.domain.flow.waits import Waiting
from orchestrator.errors import ExpressionError

TURN = 100
"""Nodes that are passed without a pause; a loop that never waits lets others have their turn."""


class Planner(Calling, Waiting):
    """Brings one run on, event by event."""

    def tell(self, event: Event) -> list[Command]:
        """Say what follows from an event. What comes too late, or twice, changes nothing."""
        state = self._state
        if state.has_ended and isinstance(event, commands.Signalled):
            self.keep(event)
            return []
        if state.has_ended and not (isinstance(event, commands.Retried) and state.error is not None):
            return []
        self._commands = []
        try:
            self._take_note(event)
        except ExpressionError as error:  # what has come cannot be written where its node wants it, or decides nothing
            if isinstance(state.work, Calls):
                self._abandon(state.work)
            self._break(str(error))
        self._go_on()
        if state.has_ended:
            self._commands.append(commands.End(state.error))
        return self._commands

    def abort(self, error: str, events: Iterable[Event] = ()) -> list[Command]:
        """End the flow: it cannot go on. Of what has happened, only what has ended counts, and what was sent."""
        self._commands = []
        state = self._state
        for event in events:
            if isinstance(event, commands.CallEnded):
                if isinstance(state.work, Calls):
                    state.work.running.pop(event.id, None)
                state.closing = [one for one in state.closing if one != event.id]
            elif isinstance(event, commands.Signalled):
                self.keep(event)
        self._end(error)
        if not self._state.closing:
            self._commands.append(commands.End(error))
        return self._commands

    def _take_note(self, event: Event) -> None:
        match event:
            case commands.Begun():
                self._begin()
            case commands.CallEnded():
                self._call_ended(event)
            case commands.TimerFired():
                self._timer_fired(event.id)
            case commands.Signalled():
                self._signalled(event)
            case commands.Retried():
                self._retried()

    def _begin(self) -> None:
        if not self._state.frames:
            self._state.frames = [Frame(self._graph.flow.start, {**(self._state.initial or {})})]
            for key, value in self._state.signals.items():
                self._show(key, value)

    def _retried(self) -> None:
        state = self._state
        if state.frames and (not state.is_over or state.error is not None):
            state.is_over, state.error, state.work, state.steps, state.closing = False, None, None, 0, []
            state.frames[-1].attempt = 1

    def _go_on(self) -> None:
        """Visit nodes until one waits."""
        state = self._state
        for _ in range(TURN):
            if state.is_over or state.work is not None or not state.frames:
                return
            if state.steps >= self._graph.flow.most_steps:
                self._end(
                    f"It has visited {state.steps:,} nodes, and at most {self._graph.flow.most_steps:,} are allowed. "
                    f"Does a loop have no end? Else raise max_steps of the flow."
                )
                return
            state.steps += 1
            state.frames[-1].entered = self._now
            try:
                self._visit(self._current())
            except ExpressionError as error:
                self._break(str(error))
        if not state.is_over and state.work is None:
            self._wait(Wait("turn"), self._now)

    def _visit(self, current: CurrentNode) -> None:
        node = current.node
        given = self._input(current, node.prep)
        if node.kind == "executor":
            self._call(current, given, 1)
        elif node.kind == "choice":
            self._choose(current, given)
        elif node.kind == "parallel":
            number = len(branches(current.graph, current.frame.node, node, current.params))
            if number:
                self._call(current, given, number)
            else:
                self._fail(given, "It has no branches: expected parallel_services, parallel_execs or params.services.")
        elif node.kind == "foreach":
            self._call_each(current, given)
        elif node.kind == "subflow":
            below = f"{self._state.cursor}/"
            for key in [one for one in self._state.deciders if one.startswith(below)]:
                if key not in self._state.signals:
                    del self._state.deciders[key]  # it was of an earlier visit
            self._state.frames.append(Frame(current.graph.inner(current.frame.node).flow.start, input=given))
        elif node.kind == "timer":
            self._start_timer(current, given)
        else:
            value = self._awaited(current, given)
            if value is not None:
                self._met(current, given, value)
            else:
                self._wait_for_signal(current, given)

    def _choose(self, current: CurrentNode, given: Any) -> None:
        node, names = current.node, current.names(given)
        if node.choice_key:
            source = find(node.choice_key, names)
            chosen = str(source) if isinstance(source, (str, int, float)) else ""
            if current.graph.edges.catches(current.frame.node, chosen):
                self._finish(given, given, action=chosen)
                return
        for case in node.choice_cases:
            if evaluate(case.expr, names):
                self._finish(given, given, action=case.action)
                return
        self._finish(given, given, action=fallback_of(node, given, names))
