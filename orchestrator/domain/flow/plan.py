"""The planner of flows: `(definition, state, event) → commands`.

A run has one cursor. It stands at a node that waits for tasks, a timer or a signal; when that comes, the node ends with
an action, and the cursor goes on along its edge, through all nodes that need not wait. In a node that is a flow
itself, the cursor goes down a level, and comes up again when that flow ends. Nothing is read here, and nothing is known
that is not in the state: so a leader may forget it all between any two events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from orchestrator.domain import zoned
from orchestrator.domain.flow import commands
from orchestrator.domain.flow.commands import Command, Event
from orchestrator.domain.flow.decisions import action_of, action_of_approval
from orchestrator.domain.flow.definition import DEFAULT, ERROR, MOST_MS, TIMEOUT, Exec, Node, Prep
from orchestrator.domain.flow.expression import evaluate, is_path
from orchestrator.domain.flow.graph import Graph, branches, of_item, passed_on, signal_path
from orchestrator.domain.flow.paths import Names, Path, find, parse, part_of, resolve, write
from orchestrator.domain.flow.state import Calls, FlowState, Frame, Kept, Wait
from orchestrator.errors import ExpressionError

MOST_ITEMS = 10_000
"""Items of one foreach: what they come to is kept with the run until the last has ended."""
AT_ONCE = 100
"""Tasks of one node that are open at the same time, where it sets no limit itself."""
MOST_AT_ONCE = 1_000
DATA_AT_ONCE = 1_000_000
"""Bytes of parameters that the open tasks of one node are given, taken together; one is always open."""
TURN = 100
"""Nodes that are passed without a pause; a loop that never waits lets others have their turn."""
FAILURE = "_error"
"""Where in the shared state it stands what went wrong, for who is reached by an edge after a failure."""


class _Place(NamedTuple):
    """Where the cursor stands."""

    graph: Graph
    frame: Frame
    node: Node
    params: dict[str, Any]
    """Those of the run, of the nodes above, and of the node."""

    def names(self, given: Any) -> Names:
        return Names(self.params, self.frame.shared, given)


class Planner:
    """Brings one run on, event by event."""

    def __init__(
        self, graph: Graph, params: dict[str, Any], state: FlowState, now: float, new_id: Callable[[int], bytes]
    ) -> None:
        self._graph = graph
        self._params = params
        self._state = state
        self._now = now
        self._new_id = new_id
        self._commands: list[Command] = []
        self._sized: tuple[str, int] | None = None

    def tell(self, event: Event) -> list[Command]:
        """Say what follows from an event. What comes too late, or twice, changes nothing."""
        state = self._state
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
        """End the flow: it cannot go on. Of what has happened, only what has ended counts: nobody waits for that."""
        self._commands = []
        state = self._state
        for event in events:
            if isinstance(event, commands.CallEnded):
                if isinstance(state.work, Calls):
                    state.work.running.pop(event.id, None)
                state.closing = [one for one in state.closing if one != event.id]
        self._end(error)
        if not self._state.closing:
            self._commands.append(commands.End(error))
        return self._commands

    # -- events

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
            self._state.frames = [Frame(self._graph.flow.start)]
            for key, value in self._state.signals.items():
                self._show(key, value)

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
            return
        try:
            key = parse(event.key).key
        except ExpressionError:  # no node can wait for it
            return
        work = state.work
        place = self._place() if isinstance(work, Wait) and work.what == "signal" else None
        if place is not None and place.node.kind == "approval" and key == self._expected(place).key:
            key = self._address(place)  # it is for the one who asks now, and for no other of that name
        if isinstance(work, Calls) and work.is_looked_up:
            work.input, work.is_looked_up = self._given(self._place(), work), False
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
        if place is not None and isinstance(work, Wait):
            value = self._awaited(place, work.input)
            if value is not None:
                self._stop_waiting(work)
                self._met(place, work.input, value)

    def _show(self, key: str, value: Any) -> None:
        """Write a signal into the shared state of the run; a decision for a flow below is none of that one's."""
        if self._state.frames and key not in self._graph.asked_below:
            _note(self._state.shared, key, value)

    def _retried(self) -> None:
        state = self._state
        if state.frames and (not state.is_over or state.error is not None):
            state.is_over, state.error, state.work, state.steps, state.closing = False, None, None, 0, []
            state.frames[-1].attempt = 1

    # -- the cursor

    def _place(self) -> _Place:
        graph, params = self._graph, self._params
        *above, frame = self._state.frames
        for outer in above:
            params = params | graph.nodes[outer.node].params
            graph = graph.inner[outer.node]
        node = graph.nodes[frame.node]
        return _Place(graph, frame, node, params | node.params)

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
                self._visit(self._place())
            except ExpressionError as error:
                self._break(str(error))
        if not state.is_over and state.work is None:
            self._wait(Wait("turn"), self._now)

    def _visit(self, place: _Place) -> None:
        node = place.node
        given = self._input(place, node.prep)
        if node.kind == "executor":
            self._call(place, given, 1)
        elif node.kind == "choice":
            self._choose(place, given)
        elif node.kind == "parallel":
            number = len(branches(place.graph, place.frame.node, node, place.params))
            if number:
                self._call(place, given, number)
            else:
                self._fail(given, "It has no branches: expected parallel_services, parallel_execs or params.services.")
        elif node.kind == "foreach":
            self._call_each(place, given)
        elif node.kind == "subflow":
            below = f"{self._state.cursor}/"
            for key in [one for one in self._state.deciders if one.startswith(below)]:
                if key not in self._state.signals:
                    del self._state.deciders[key]  # it was of an earlier visit
            self._state.frames.append(Frame(place.graph.inner[place.frame.node].flow.start, input=given))
        elif node.kind == "timer":
            self._start_timer(place, given)
        else:
            value = self._awaited(place, given)
            if value is not None:
                self._met(place, given, value)
            else:
                self._wait_for_signal(place, given)

    def _input(self, place: _Place, prep: Prep) -> Any:
        """Return what a node takes in; `$input` is there what the flow around it was given."""
        frame = place.frame
        outer = self._params if frame is self._state.frames[0] else frame.input
        names = Names(place.params, frame.shared, outer)
        if prep.input_map:
            return {name: find(path, names) for name, path in prep.input_map.items()}
        return find(prep.input_key, names) if prep.input_key else None

    def _finish(self, given: Any, result: Any, *, action: str = "", shown: Any = None) -> None:
        """End the present node well: write what it gave, and go on along its action."""
        place = self._place()
        post, shared = place.node.post, place.frame.shared
        if post.output_key:
            write(shared, post.output_key, result)
        for key, part in post.output_map.items():
            write(shared, key, part_of(result, part))
        action = action or action_of(place.node, result)
        self._record(place, "success", given, result if shown is None else shown, action)
        self._follow(place, action)

    def _fail(self, given: Any, error: str, *, output: Any = None) -> None:
        """End the present node badly: an edge catches that, or it ends the flow that it stands in."""
        place = self._place()
        key, edges = place.frame.node, place.graph.edges
        is_tried_again = place.node.kind == "subflow" and place.frame.attempt <= (place.node.max_retries or 0)
        caught = not is_tried_again and (edges.catches(key, ERROR) or edges.catches(key, DEFAULT))
        self._record(place, "failed", given, output, ERROR if caught else "", error)
        if is_tried_again:
            place.frame.attempt += 1
            if place.node.wait_ms:
                self._wait(Wait("retry"), self._now + place.node.wait_ms / 1000)
        elif caught:
            place.frame.shared[FAILURE] = {"node": key, "error": error}
            self._follow(place, ERROR)
        elif len(self._state.frames) == 1:
            self._end(f"Node {key!r}: {error}")
        else:
            inner = self._state.frames.pop()
            self._fail(inner.input, f"Node {key!r}: {error}", output=inner.shared)

    def _break(self, error: str | None) -> None:
        """End the present node badly; where that ends the flow around it, its result may be what cannot be written."""
        while error is not None:
            told, error = error, None
            try:
                self._fail(None, told)
            except ExpressionError as another:
                error = str(another)

    def _follow(self, place: _Place, action: str) -> None:
        frame = place.frame
        to = place.graph.edges.follow(frame.node, action)
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
        """End the flow; of what is open, nothing is waited for but the news that it was cancelled."""
        state = self._state
        if isinstance(state.work, Calls):
            self._abandon(state.work)
        elif isinstance(state.work, Wait):
            self._stop_waiting(state.work)
        state.work, state.is_over, state.error = None, True, error

    # -- nodes that are decided at once

    def _choose(self, place: _Place, given: Any) -> None:
        node, names = place.node, place.names(given)
        if node.choice_key:
            source = find(node.choice_key, names)
            chosen = str(source) if isinstance(source, (str, int, float)) else ""
            if place.graph.edges.catches(place.frame.node, chosen):
                self._finish(given, given, action=chosen)
                return
        for case in node.choice_cases:
            if evaluate(case.expr, names):
                self._finish(given, given, action=case.action)
                return
        self._finish(given, given)

    # -- nodes that wait for tasks

    def _call_each(self, place: _Place, given: Any) -> None:
        if not isinstance(given, list):
            self._fail(given, f"A foreach takes a list; its input is {_described(given)}.")
        elif len(given) > MOST_ITEMS:
            self._fail(None, f"Its list has {len(given):,} items, and at most {MOST_ITEMS:,} are allowed.")
        elif not given:
            self._finish(given, [])
        else:
            self._call(place, given, len(given))

    def _call(self, place: _Place, given: Any, total: int) -> None:
        state = self._state
        calls = Calls(given, total, state.made, [None] * total)
        kept, state.kept = state.kept, None
        if kept is not None and kept.path == state.cursor and len(kept.values) == total:
            calls.values, calls.kept = kept.values, kept.positions
        if place.node.kind == "foreach":
            calls.input, calls.is_looked_up = None, True
        state.work = calls
        self._create(place, calls)

    def _given(self, place: _Place, calls: Calls) -> Any:
        return self._input(place, place.node.prep) if calls.is_looked_up else calls.input

    def _create(self, place: _Place, calls: Calls) -> None:
        """Create as many tasks as the node lets be open at once."""
        if calls.created == calls.total - len(calls.kept):
            return
        node = place.node
        common = place.graph.executor(place.frame.node)
        is_one = common.exec_type == "local_func" and node.kind != "parallel" and not node.foreach_execs
        names = self._graph.flow.takes.get(common.func or common.service) if is_one else None
        params = passed_on(node, place.params, names)
        width = 1 if node.parallel_mode == "sequential" else min(node.max_parallel or AT_ONCE, MOST_AT_ONCE)
        if width > 1:
            width = min(width, max(1, DATA_AT_ONCE // (1 + self._size(params))))
        positions, given = calls.open_positions, self._given(place, calls)
        while calls.created < len(positions) and len(calls.running) < width:
            position = positions[calls.created]
            executor, own = self._branch(place, given, position)
            identifier = self._made()
            calls.running[identifier] = position
            calls.created += 1
            count = None if node.kind == "executor" else calls.total
            more = params | executor.params if executor.params else params
            path = self._state.cursor
            self._commands.append(commands.Call(identifier, path, node, executor, position, count, own, more))

    def _size(self, params: dict[str, Any]) -> int:
        """Return how many bytes every task of the present node is given of the parameters."""
        cursor = self._state.cursor
        if self._sized is None or self._sized[0] != cursor:
            self._sized = cursor, len(zoned.encode(params))
        return self._sized[1]

    def _branch(self, place: _Place, given: Any, position: int) -> tuple[Exec, Any]:
        graph, key, node = place.graph, place.frame.node, place.node
        if node.kind == "foreach":
            return of_item(graph, key, node, position), given[position]
        if node.kind == "executor":
            return graph.executor(key), given
        executor = branches(graph, key, node, place.params)[position]
        own = executor.prep.input_key or executor.prep.input_map
        return executor, self._input(place, executor.prep) if own else given

    def _write_branch(self, position: int, value: Any) -> None:
        place = self._place()
        if place.node.parallel_execs:
            post = place.node.parallel_execs[position].post
            if post.output_key:
                write(place.frame.shared, post.output_key, value)

    def _follow_calls(self, calls: Calls) -> None:
        """Go on after a task of the present node has ended."""
        place = self._place()
        node = place.node
        if calls.errors and not node.ignores_errors and node.failure_strategy != "collect_errors":
            done = calls.done
            self._abandon(calls)
            position, error = next(iter(calls.errors.items()))
            text = error if node.kind == "executor" else f"Branch {position}: {error}"
            self._fail_calls(self._given(place, calls), text, calls, done)
            return
        self._create(place, calls)
        if calls.running:
            return
        given = self._given(place, calls)
        result = calls.values[0] if node.kind == "executor" else calls.values
        if calls.errors and not node.ignores_errors:
            if node.post.output_key:
                write(place.frame.shared, node.post.output_key, result)
            told = "; ".join(f"branch {position}: {error}" for position, error in sorted(calls.errors.items())[:10])
            of = f"{len(calls.errors)} of {calls.total} branches failed: "
            text = calls.errors[0] if node.kind == "executor" else of + told
            self._fail_calls(given, text, calls, calls.done, output=result)
            return
        self._finish(given, result)

    def _fail_calls(self, given: Any, error: str, calls: Calls, done: list[int], *, output: Any = None) -> None:
        """End a node whose tasks failed; if that ends the run, a retry does not call again what had ended well."""
        state, path = self._state, self._state.cursor
        self._fail(given, error, output=output)
        if done and state.is_over and state.cursor == path:
            state.kept = Kept(path, calls.values, done)

    def _abandon(self, calls: Calls) -> None:
        """Cancel what still runs; the run does not end before that is known to have ended."""
        if calls.running:
            self._commands.append(commands.CancelCalls(list(calls.running)))
            self._state.closing += calls.running
            calls.running = {}

    # -- nodes that wait for something else

    def _start_timer(self, place: _Place, given: Any) -> None:
        delay = self._number(place, given, "delay_ms")
        if delay is None:
            self._fail(given, "A timer takes the number params.delay_ms.")
        elif delay <= 0:
            self._finish(given, given)
        else:
            self._wait(Wait("timer", given), self._now + delay / 1000)

    def _wait_for_signal(self, place: _Place, given: Any) -> None:
        timeout = self._number(place, given, "timeout_ms")
        wait = Wait("signal", given, key=self._address(place))
        if timeout is not None and timeout > 0:
            self._wait(wait, self._now + timeout / 1000)
        else:
            self._state.work = wait

    def _expected(self, place: _Place) -> Path:
        """Return where a node looks for the signal that it waits for."""
        return signal_path(place.frame.node, place.node)

    def _address(self, place: _Place) -> str:
        """Return what the signal is called that a node waits for: of an approval, with the nodes above it."""
        key = self._expected(place).key
        above = [frame.node for frame in self._state.frames[:-1]]
        return "/".join([*above, key]) if place.node.kind == "approval" else key

    def _awaited(self, place: _Place, given: Any) -> Any:
        """Return what a node waits for, if it is there: in the data of the run, or as a signal that was sent."""
        value = resolve(self._expected(place), place.names(given))
        value = self._state.signals.get(self._address(place)) if value is None else value
        return None if value == "" and place.node.kind == "approval" else value

    def _met(self, place: _Place, given: Any, value: Any) -> None:
        """End a node whose signal is there."""
        address = self._address(place)
        by, at, why = self._state.deciders.get(address, ("", self._now, ""))
        if place.node.params.get("consume"):
            self._consume(place, address)
        elif address in self._graph.asked_below and self._state.signals.pop(address, None) is not None:
            _note(place.frame.shared, self._expected(place).key, value)
        if place.node.kind != "approval":
            self._finish(given, value)
            return
        shown = {"approval": value, "by": by, "at": at, "why": why}
        self._finish(given, value, action=action_of_approval(place.node, value), shown=shown)

    def _consume(self, place: _Place, address: str) -> None:
        """Take a signal away, so that the next one that was sent stands in its place."""
        state = self._state
        state.signals.pop(address, None)
        state.deciders.pop(address, None)
        self._show(address, None)
        _note(place.frame.shared, self._expected(place).key, None)
        if queue := state.queued.pop(address, []):
            value, by, at, why = queue[0]
            state.signals[address], state.deciders[address] = value, (by, at, why)
            if queue[1:]:
                state.queued[address] = queue[1:]
            self._show(address, value)

    def _timed_out(self, work: Wait) -> None:
        place = self._place()
        if place.node.ignores_errors:
            self._finish(work.input, None)
            return
        waited = self._now - place.frame.entered
        error = f"Nobody sent {work.key!r} within {waited:.3g} s."
        if place.graph.edges.catches(place.frame.node, TIMEOUT):
            self._record(place, "failed", work.input, None, TIMEOUT, error)
            self._follow(place, TIMEOUT)
        else:
            self._fail(work.input, error)

    def _number(self, place: _Place, given: Any, name: str) -> float | None:
        value = place.node.params.get(name)  # those of the run are what it works on, and do not say how
        value = find(str(value), place.names(given)) if is_path(value) else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        if not value <= MOST_MS:
            raise ExpressionError(
                f"params.{name} is at most {MOST_MS:,} milliseconds, a hundred years; found {value:,}."
            )
        return float(value)

    def _wait(self, wait: Wait, due: float) -> None:
        wait.timer, wait.due = self._made(), due
        self._state.work = wait
        self._commands.append(commands.StartTimer(wait.timer, due))

    def _stop_waiting(self, wait: Wait) -> None:
        if wait.timer is not None:
            self._commands.append(commands.CancelTimer(wait.timer))
        self._state.work = None

    # -- numbers

    def _made(self) -> bytes:
        self._state.made += 1
        return self._new_id(self._state.made - 1)

    def _record(
        self, place: _Place, status: str, given: Any, output: Any, action: str, error: str | None = None
    ) -> None:
        state, work = self._state, self._state.work
        calls = work if isinstance(work, Calls) else None
        state.recorded += 1
        self._commands.append(
            commands.NodeRun(
                number=state.recorded,
                path=state.cursor,
                kind=place.node.kind,
                status=status,
                attempt=place.frame.attempt,
                action=action,
                error=error,
                input=given,
                output=output,
                first_call=calls.first if calls else 0,
                calls=calls.created if calls else 0,
                started=place.frame.entered,
            )
        )
        state.work = None


def _note(shared: dict[str, Any], key: str, value: Any) -> None:
    """Write a signal into a shared state, if it can stand there; who waits for it finds it anyway."""
    with suppress(ExpressionError):
        write(shared, key, value)


def _described(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"{type(value).__name__} {value!r}"[:80]
