"""The cursor of a flow run: the current node, its input and output, and the step to the next node.

Subclasses do the work of nodes: `plan.Calling` calls tasks, and `waits.Waiting` waits for timers and signals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from orchestrator.domain.flow import commands
from orchestrator.domain.flow.commands import Command
from orchestrator.domain.flow.decisions import action_of
from orchestrator.domain.flow.definition import ERROR, Node, Prep
from orchestrator.domain.flow.graph import Graph
from orchestrator.domain.flow.paths import Names, find, part_of, write
from orchestrator.domain.flow.state import Calls, FlowState, Frame, Wait
from orchestrator.errors import ExpressionError

FAILURE = "_error"
"""The key of the shared state that holds the error after a failure, for the node that handles it."""


class CurrentNode(NamedTuple):
    """The node at the cursor."""

    graph: Graph
    frame: Frame
    node: Node
    params: dict[str, Any]
    """The merged parameters of the run, of the nodes above, and of the node."""

    def names(self, node_input: Any) -> Names:
        return Names(self.params, self.frame.shared, node_input)


class Cursor:
    """Enters and leaves the nodes of one run."""

    def __init__(
        self, graph: Graph, params: dict[str, Any], state: FlowState, now: float, new_id: Callable[[int], bytes]
    ) -> None:
        self._graph = graph
        self._params = params
        self._state = state
        self._now = now
        self._new_id = new_id
        self._commands: list[Command] = []

    def _current(self) -> CurrentNode:
        graph, params = self._graph, self._params
        *above, frame = self._state.frames
        for outer in above:
            params = params | graph.nodes[outer.node].params
            graph = graph.inner(outer.node)
        node = graph.nodes[frame.node]
        return CurrentNode(graph, frame, node, params | node.params if node.params else params)

    def _input(self, current: CurrentNode, prep: Prep) -> Any:
        """Return the input of a node. In a subflow, `$input` is the input of the subflow's node."""
        frame = current.frame
        outer = self._params if frame is self._state.frames[0] else frame.input
        names = Names(current.params, frame.shared, outer)
        if prep.input_map:
            return {name: find(path, names) for name, path in prep.input_map.items()}
        return find(prep.input_key, names) if prep.input_key else None

    def _call_input(self, current: CurrentNode, calls: Calls) -> Any:
        return self._input(current, current.node.prep) if calls.recomputes_input else calls.input

    def _finish(self, node_input: Any, result: Any, *, action: str = "", recorded_output: Any = None) -> None:
        """End the current node successfully: write its result to the shared state and follow its action."""
        current = self._current()
        post, shared = current.node.post, current.frame.shared
        if post.output_key:
            write(shared, post.output_key, result)
        for key, part in post.output_map.items():
            write(shared, key, part_of(result, part))
        action = action or action_of(current.node, result)
        self._record(current, "success", node_input, result if recorded_output is None else recorded_output, action)
        self._follow(current, action)

    def _fail(self, node_input: Any, error: str, *, output: Any = None) -> None:
        """End the current node as failed: follow an edge that handles the failure, or fail the surrounding flow."""
        current = self._current()
        key = current.frame.node
        is_retried = current.node.kind == "subflow" and current.frame.attempt <= (current.node.max_retries or 0)
        caught = not is_retried and current.graph.handles_failure(key)
        self._record(current, "failed", node_input, output, ERROR if caught else "", error)
        if is_retried:
            current.frame.attempt += 1
            if current.node.wait_ms:
                self._wait(Wait("retry"), self._now + current.node.wait_ms / 1000)
        elif caught:
            current.frame.shared[FAILURE] = {"node": key, "error": error}
            self._follow(current, ERROR)
        elif len(self._state.frames) == 1:
            self._end(f"Node {key!r}: {error}")
        else:
            inner = self._state.frames.pop()
            self._fail(inner.input, f"Node {key!r}: {error}", output=inner.shared)

    def _break(self, error: str | None) -> None:
        """Fail the current node. If the result of a surrounding flow cannot be written, that fails, too."""
        while error is not None:
            message, error = error, None
            try:
                self._fail(None, message)
            except ExpressionError as another:
                error = str(another)

    def _follow(self, current: CurrentNode, action: str) -> None:
        frame = current.frame
        to = current.graph.edges.follow(frame.node, action)
        frame.last_action, frame.attempt = action, 1
        if to:
            frame.node = to
        elif len(self._state.frames) > 1:
            inner = self._state.frames.pop()
            self._finish(inner.input, inner.shared)
        else:
            frame.node = ""
            self._end(None)

    def _end(self, error: str | None) -> None:
        """End the flow. Open tasks are cancelled, and the run waits only until they have ended."""
        state = self._state
        if isinstance(state.work, Calls):
            self._abandon(state.work)
        elif isinstance(state.work, Wait):
            self._stop_waiting(state.work)
        state.work, state.is_over, state.error = None, True, error

    def _abandon(self, calls: Calls) -> None:
        """Cancel open tasks. The run does not end before they have ended."""
        if calls.running:
            self._commands.append(commands.CancelCalls(list(calls.running)))
            self._state.closing += calls.running
            calls.running = {}

    def _wait(self, wait: Wait, due: float) -> None:
        wait.timer, wait.due = self._next_id(), due
        self._state.work = wait
        self._commands.append(commands.StartTimer(wait.timer, due))

    def _stop_waiting(self, wait: Wait) -> None:
        if wait.timer is not None:
            self._commands.append(commands.CancelTimer(wait.timer))
        self._state.work = None

    def _next_id(self) -> bytes:
        self._state.made += 1
        return self._new_id(self._state.made - 1)

    def _record(
        self, current: CurrentNode, status: str, node_input: Any, output: Any, action: str, error: str | None = None
    ) -> None:
        state, work = self._state, self._state.work
        calls = work if isinstance(work, Calls) else None
        state.recorded += 1
        self._commands.append(
            commands.NodeRun(
                number=state.recorded,
                path=state.cursor,
                kind=current.node.kind,
                status=status,
                attempt=current.frame.attempt,
                action=action,
                error=error,
                input=node_input,
                output=output,
                first_call=calls.first if calls else 0,
                calls=calls.created if calls else 0,
                started=current.frame.entered,
            )
        )
        state.work = None
