"""The planner of flows: `(definition, state, event) → commands`.

A run has one cursor. The current node waits for tasks, a timer or a signal. When it ends with an action, the cursor
follows the action's edge and passes all nodes that need not wait. A subflow adds a level to the cursor until it ends.
The planner reads nothing but the state, so the leader may forget a run between two events.

This file handles events and visits nodes. `cursor` moves from node to node, and `waits` has nodes that wait for timers
and signals.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from orchestrator.domain import timezones
from orchestrator.domain.flow import commands
from orchestrator.domain.flow.commands import Command, Event
from orchestrator.domain.flow.cursor import CurrentNode, Cursor
from orchestrator.domain.flow.decisions import fallback_of
from orchestrator.domain.flow.definition import Exec
from orchestrator.domain.flow.expression import evaluate
from orchestrator.domain.flow.graph import branches, node_params, of_item
from orchestrator.domain.flow.paths import find, write
from orchestrator.domain.flow.state import Calls, Frame, Kept, Wait
from orchestrator.domain.flow.waits import Waiting
from orchestrator.errors import ExpressionError

# -- nodes that call tasks: a single one, one per branch, or one per list item

MAX_ITEMS = 10_000
"""Items of one foreach, at most: their results are kept in the run's state until the last has ended."""
AT_ONCE = 100
"""Open tasks of one node, unless the node sets a limit."""
MAX_AT_ONCE = 1_000
DATA_AT_ONCE = 1_000_000
"""Bytes of parameters sent to the open tasks of one node, at most. One task is always open."""


class Calling(Cursor):
    """Calls tasks for the current node."""

    _sized: tuple[str, int] | None = None

    def _call_ended(self, event: commands.CallEnded) -> None:
        work = self._state.work
        if event.id in self._state.closing:
            self._state.closing.remove(event.id)
        elif isinstance(work, Calls) and event.id in work.running:
            position = work.running.pop(event.id)
            if event.error is not None:
                work.errors[position] = event.error
            else:
                work.values[position] = event.value
                self._write_branch(position, event.value)
            self._follow_calls(work)

    def _call_each(self, current: CurrentNode, node_input: Any) -> None:
        if not isinstance(node_input, list):
            self._fail(node_input, f"A foreach takes a list; its input is {_described(node_input)}.")
        elif len(node_input) > MAX_ITEMS:
            self._fail(None, f"Its list has {len(node_input):,} items, and at most {MAX_ITEMS:,} are allowed.")
        elif not node_input:
            self._finish(node_input, [])
        else:
            self._call(current, node_input, len(node_input))

    def _call(self, current: CurrentNode, node_input: Any, total: int) -> None:
        state = self._state
        calls = Calls(node_input, total, state.made, [None] * total)
        kept, state.kept = state.kept, None
        if kept is not None and kept.path == state.cursor and len(kept.values) == total:
            calls.values, calls.kept = kept.values, kept.positions
        if current.node.kind == "foreach":
            calls.input, calls.recomputes_input = None, True
        state.work = calls
        self._create(current, calls)

    def _create(self, current: CurrentNode, calls: Calls) -> None:
        """Create as many tasks as may be open at once."""
        if calls.created == calls.total - len(calls.kept):
            return
        node = current.node
        common = current.graph.executor(current.frame.node)
        has_one_function = common.exec_type == "local_func" and node.kind != "parallel" and not node.foreach_execs
        names = self._graph.flow.takes.get(common.func or common.service) if has_one_function else None
        params = node_params(node, current.params, names)
        width = 1 if node.parallel_mode == "sequential" else min(node.max_parallel or AT_ONCE, MAX_AT_ONCE)
        if width > 1:
            width = min(width, max(1, DATA_AT_ONCE // (1 + self._size(params))))
        positions, node_input = calls.open_positions, self._call_input(current, calls)
        while calls.created < len(positions) and len(calls.running) < width:
            position = positions[calls.created]
            executor, own = self._branch(current, node_input, position)
            identifier = self._next_id()
            calls.running[identifier] = position
            calls.created += 1
            count = None if node.kind == "executor" else calls.total
            task_params = params | executor.params if executor.params else params
            path = self._state.cursor
            self._commands.append(commands.Call(identifier, path, node, executor, position, count, own, task_params))

    def _size(self, params: dict[str, Any]) -> int:
        """Return the encoded size of the parameters for each task of the current node."""
        cursor = self._state.cursor
        if self._sized is None or self._sized[0] != cursor:
            self._sized = cursor, len(timezones.encode(params))
        return self._sized[1]

    def _branch(self, current: CurrentNode, node_input: Any, position: int) -> tuple[Exec, Any]:
        graph, key, node = current.graph, current.frame.node, current.node
        if node.kind == "foreach":
            return of_item(graph, key, node, position), node_input[position]
        if node.kind == "executor":
            return graph.executor(key), node_input
        executor = branches(graph, key, node, current.params)[position]
        own = executor.prep.input_key or executor.prep.input_map
        return executor, self._input(current, executor.prep) if own else node_input

    def _write_branch(self, position: int, value: Any) -> None:
        current = self._current()
        if current.node.parallel_execs:
            post = current.node.parallel_execs[position].post
            if post.output_key:
                write(current.frame.shared, post.output_key, value)

    def _follow_calls(self, calls: Calls) -> None:
        """Continue after a task of the current node has ended."""
        current = self._current()
        node = current.node
        if calls.errors and not node.ignores_errors and node.failure_strategy != "collect_errors":
            done = calls.done
            self._abandon(calls)
            position, error = next(iter(calls.errors.items()))
            text = error if node.kind == "executor" else f"Branch {position}: {error}"
            self._fail_calls(self._call_input(current, calls), text, calls, done)
            return
        self._create(current, calls)
        if calls.running:
            return
        node_input = self._call_input(current, calls)
        result = calls.values[0] if node.kind == "executor" else calls.values
        if calls.errors and not node.ignores_errors:
            if node.post.output_key:
                write(current.frame.shared, node.post.output_key, result)
            errors = "; ".join(f"branch {position}: {error}" for position, error in sorted(calls.errors.items())[:10])
            prefix = f"{len(calls.errors)} of {calls.total} branches failed: "
            text = calls.errors[0] if node.kind == "executor" else prefix + errors
            self._fail_calls(node_input, text, calls, calls.done, output=result)
            return
        self._finish(node_input, result)

    def _fail_calls(self, node_input: Any, error: str, calls: Calls, done: list[int], *, output: Any = None) -> None:
        """Fail a node whose tasks failed. If that ends the run, keep the successful results for a retry."""
        state, path = self._state, self._state.cursor
        self._fail(node_input, error, output=output)
        if done and state.is_over and state.cursor == path:
            state.kept = Kept(path, calls.values, done)


def _described(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"{type(value).__name__} {value!r}"[:80]


# -- the planner

TURN = 100
"""Nodes visited in one go. A loop that never waits yields to other runs after that many."""


class Planner(Calling, Waiting):
    """Advances one run, event by event."""

    def handle(self, event: Event) -> list[Command]:
        """Apply an event and return the commands that follow. Late or repeated events change nothing."""
        state = self._state
        if state.has_ended and isinstance(event, commands.Signalled):
            self.keep_signal(event)
            return []
        if state.has_ended and not (isinstance(event, commands.Retried) and state.error is not None):
            return []
        self._commands = []
        try:
            self._apply(event)
        except ExpressionError as error:  # the value cannot be written where the node wants it, or decides nothing
            if isinstance(state.work, Calls):
                self._abandon(state.work)
            self._break(str(error))
        self._advance()
        if state.has_ended:
            self._commands.append(commands.End(state.error))
        return self._commands

    def abort(self, error: str, events: Iterable[Event] = ()) -> list[Command]:
        """Fail a run that cannot continue. Of the given events, only ended calls and signals are applied."""
        self._commands = []
        state = self._state
        for event in events:
            if isinstance(event, commands.CallEnded):
                if isinstance(state.work, Calls):
                    state.work.running.pop(event.id, None)
                state.closing = [call for call in state.closing if call != event.id]
            elif isinstance(event, commands.Signalled):
                self.keep_signal(event)
        self._end(error)
        if not self._state.closing:
            self._commands.append(commands.End(error))
        return self._commands

    def _apply(self, event: Event) -> None:
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
                self._share_signal(key, value)

    def _retried(self) -> None:
        state = self._state
        if state.frames and (not state.is_over or state.error is not None):
            state.is_over, state.error, state.work, state.steps, state.closing = False, None, None, 0, []
            state.frames[-1].attempt = 1

    def _advance(self) -> None:
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
        node_input = self._input(current, node.prep)
        if node.kind == "executor":
            self._call(current, node_input, 1)
        elif node.kind == "choice":
            self._choose(current, node_input)
        elif node.kind == "parallel":
            number = len(branches(current.graph, current.frame.node, node, current.params))
            if number:
                self._call(current, node_input, number)
            else:
                self._fail(
                    node_input, "It has no branches: expected parallel_services, parallel_execs or params.services."
                )
        elif node.kind == "foreach":
            self._call_each(current, node_input)
        elif node.kind == "subflow":
            below = f"{self._state.cursor}/"
            for key in [decider for decider in self._state.deciders if decider.startswith(below)]:
                if key not in self._state.signals:
                    del self._state.deciders[key]  # from an earlier visit
            self._state.frames.append(Frame(current.graph.inner(current.frame.node).flow.start, input=node_input))
        elif node.kind == "timer":
            self._start_timer(current, node_input)
        else:
            value = self._find_signal(current, node_input)
            if value is not None:
                self._receive(current, node_input, value)
            else:
                self._wait_for_signal(current, node_input)

    def _choose(self, current: CurrentNode, node_input: Any) -> None:
        node, names = current.node, current.names(node_input)
        if node.choice_key:
            source = find(node.choice_key, names)
            chosen = str(source) if isinstance(source, (str, int, float)) else ""
            if current.graph.edges.catches(current.frame.node, chosen):
                self._finish(node_input, node_input, action=chosen)
                return
        for case in node.choice_cases:
            if evaluate(case.expr, names):
                self._finish(node_input, node_input, action=case.action)
                return
        self._finish(node_input, node_input, action=fallback_of(node, node_input, names))
