"""Runs: of many tasks, and of workflows that are data; some of it holds for runs of code too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from orchestrator.domain.dag.composed import is_composed
from orchestrator.domain.dag.graph import Graph
from orchestrator.domain.dag.state import DagState, StepState, kept_state, step_output
from orchestrator.domain.ids import to_text
from orchestrator.domain.plain import stored_json
from orchestrator.domain.sealed import reveal_error
from orchestrator.domain.states import ENDED_RUN_STATES, RunState
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import InvalidTask, InvalidWorkflow, NotFound, WrongState, did_you_mean
from orchestrator.references import Reference, is_reference
from orchestrator.sdk.backend.code import CodeBackend
from orchestrator.sdk.backend.connections import Connections
from orchestrator.sdk.backend.logs import read_run
from orchestrator.sdk.backend.part import Part, Shared, ask, check_state, reading_one
from orchestrator.sdk.calls.runs import RunWork, walk_ends
from orchestrator.sdk.calls.waits import MISSING
from orchestrator.sdk.tasks.logs import LogPage
from orchestrator.sdk.values.payload import decode_value, decode_within, encode_value
from orchestrator.sdk.values.sealing import left_task, seal_task
from orchestrator.sdk.waiting.steps import Steps
from orchestrator.sealing import reveal
from orchestrator.store import payloads
from orchestrator.store.dag import plans as dags
from orchestrator.store.dag import workflows
from orchestrator.store.flow import runs as flow_runs
from orchestrator.store.inbox import RequestKind
from orchestrator.store.runs import cancels as run_retries
from orchestrator.store.runs import creation, stuck
from orchestrator.store.runs.creation import NewRun
from orchestrator.store.tasks import enqueue, results
from orchestrator.store.tasks.results import EndedAt
from orchestrator.time_limits import TimeLimit
from orchestrator.trace_context import current_trace
from orchestrator.transport.changes import Entry, Follower
from orchestrator.transport.codec import Ended
from orchestrator.transport.connection import UNAVAILABLE

_PAGE = 5_000
_LARGEST_OUTPUTS = 1_000_000_000
"""Bytes; each of them has been within the limit of a result."""


class RunBackend(Part, RunWork):
    """Calls about runs."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._code = CodeBackend(shared)

    progress = reading_one(results.progress, lambda run: NotFound.by_id("run", to_text(run)))

    def start(self, run_id: bytes, name: str, tasks: Iterable[NewTask], *, repeated: bool = False) -> None:
        """Create a run and its tasks, all or none; if this is `repeated`, they may have been created before."""
        try:
            with self._connections.writing(f"run {to_text(run_id)} was stored", transaction=True) as connection:
                if repeated and results.run_states(connection, [run_id]):
                    return
                if (store := self._payloads) is not None:
                    tasks = (left_task(task, store) for task in tasks)
                if (vault := self._vault) is not None:
                    tasks = (seal_task(task, vault) for task in tasks)
                ids: list[bytes] = []
                total = enqueue.copy_tasks(connection, _noted(tasks, ids) if repeated else tasks)
                if ids and results.has_ended(connection, ids):
                    raise InvalidTask("An id of these tasks is that of another task: make a new one for each task.")
                if not creation.create(connection, [NewRun(run_id, name, total, trace=current_trace())]) and repeated:
                    connection.rollback()  # the first time has come to its end meanwhile
        except IntegrityError:
            if not repeated:
                raise
            self.progress(run_id)  # it is there
        self._connections.nudge()

    def rerun(self, run: bytes, new: bytes, from_step: str | None, *, repeated: bool = False) -> None:
        with self._connections.changing(f"run {to_text(new)} was stored") as connection:
            if repeated and results.run_states(connection, [new]):
                return
            self._connections.record(connection, "rerun", "run", to_text(run), new=to_text(new), from_step=from_step)
            is_other = self._code.rerun(connection, run, new, from_step) or self._flow_again(
                connection, run, new, from_step
            )
            if not is_other:
                self._steps_again(connection, run, new, from_step)

    def _flow_again(self, connection: Connection, run: bytes, new: bytes, from_step: str | None) -> bool:
        """Start a run of a flow over; False if it is none."""
        again = flow_runs.again(connection, run, new)
        if again is None:
            return False
        if from_step is not None:
            raise WrongState(
                f"Run {to_text(run)} is of a flow, which begins at its start: leave out the step. To go on at the node "
                f"that failed: orchestrator runs retry {to_text(run)}"
            )
        creation.create(connection, [dags.sealed(again._replace(trace=current_trace()), self._vault)])
        return True

    def _steps_again(self, connection: Connection, run: bytes, new: bytes, from_step: str | None) -> None:
        """Start a run of a DAG over."""
        found = next(iter(dags.load(connection, [run])), None)
        definition = workflows.of_run(connection, run)
        if found is None or definition is None:
            raise WrongState(f"Run {to_text(run)} cannot be run again: it is not a run of a workflow.")
        graph = Graph(definition)
        if from_step is not None and from_step not in graph.index:
            raise InvalidWorkflow(
                f"Workflow {definition.name!r} has no task {from_step!r}.{did_you_mean(from_step, graph.index)}"
            )
        state = msgspec.msgpack.decode(found.state, type=DagState) if found.state is not None else None
        kept = kept_state(graph, state, from_step) if from_step is not None and state is not None else None
        again = dags.new_run(definition, found.version, new, found.params)
        again = again._replace(
            fire_time=found.fire_time.isoformat(),
            tags=stored_json(found.tags),
            trace=current_trace(),
            headers=found.headers,
        )
        creation.create(connection, [dags.sealed(again, self._vault)])
        if kept is not None:
            names = [graph.steps[place].name for place in kept.successes]
            dags.keep(connection, run, new, names, msgspec.msgpack.encode(kept))
        if kept is not None or is_composed(definition.name):  # whose arguments may be stored
            payloads.keep_all(connection, run, new)

    # -- asking

    def cancel(self, run: bytes) -> None:
        state, _ = self.progress(run)
        if state == RunState.CANCELLED:
            return
        ask(self._connections, RequestKind.CANCEL_RUN, run, state, allowed=state not in ENDED_RUN_STATES)

    def retry(self, run: bytes) -> None:
        if self._code.retry(run):
            return
        state, _ = self.progress(run)
        if state == RunState.RUNNING:
            with self._reading() as connection:
                state = "stuck" if stuck.reason(connection, run) is not None else state
        elif state == RunState.FAILED:
            self._refuse_child(run)
        ask(self._connections, RequestKind.RETRY_RUN, run, state, allowed=state in (RunState.FAILED, "stuck"))

    def _refuse_child(self, run: bytes) -> None:
        with self._reading() as connection:
            parent = run_retries.parent_of(connection, run)
        if parent is not None:
            raise WrongState(
                f"Run {to_text(run)} cannot be retried by itself: it is step {parent[1]!r} of run {parent[0]}, and is "
                f"retried with that one: orchestrator runs retry {parent[0]}"
            )

    def delete(self, run: bytes) -> None:
        if not self._connections.ask_all(RequestKind.DELETE_RUN, [run]):
            state, _ = self.progress(run)
            check_state(RequestKind.DELETE_RUN, run, state, allowed=state in ENDED_RUN_STATES)
            raise WrongState(
                f"Cannot delete run {to_text(run)} by itself: it is a child of another run and is deleted with that "
                "one, or its last tasks are still being cancelled."
            )

    # -- reading

    def log(self, run: bytes, after: str = "", wait: float = 0.0) -> LogPage:
        return read_run(self._connections, run, after, wait)

    def listen(self, run: bytes) -> RunListener:
        return RunListener(self._connections, run)

    def ends(self, run: bytes) -> Iterator[Ended]:
        return walk_ends(self.ends_after, run)

    def ends_after(self, run: bytes, position: int) -> list[EndedAt]:
        with self._reading() as connection:
            ends = results.run_results(connection, run, position, _PAGE)
        return [end._replace(result=reveal(end.result), error=end.error and reveal_error(end.error)) for end in ends]

    def outputs(self, run: bytes, steps: Sequence[str] | None = None) -> dict[str, Any]:
        return self._outputs(run, lambda _, result: decode_value(result), steps)

    def stored_outputs(self, run: bytes) -> dict[str, Any]:
        """Return outputs whose values are bytes, to be compared with those of another run."""
        return self._outputs(run, lambda _, result: reveal(result))

    def outputs_within(
        self, run: bytes, most: int, steps: Sequence[str] | None = None
    ) -> tuple[dict[str, Any], dict[str, list[Reference]]]:
        """Return the same with no more than so many bytes from the payload store, and, by step, what is left there."""
        left: dict[str, list[Reference]] = {}
        budget = most

        def take(step: str, reference: Reference) -> bool:
            nonlocal budget
            fits = reference.size <= budget
            if fits:
                budget -= reference.size
            else:
                left.setdefault(step, []).append(reference)
            return fits

        return self._outputs(run, lambda step, result: decode_within(result, partial(take, step)), steps), left

    def encoded_outputs(self, run: bytes, steps: Sequence[str] | None = None) -> bytes:
        """Return them as one encoded value with references to stored values, which the caller reads."""
        what = f"The outputs of run {to_text(run)}"

        def encoded(_: str, result: bytes) -> msgspec.Raw:
            if is_reference(result):
                return msgspec.Raw(result)
            return msgspec.Raw(encode_value(decode_value(result), what, _LARGEST_OUTPUTS))

        return msgspec.msgpack.encode(self._outputs(run, encoded, steps))

    def _outputs(
        self, run: bytes, decode: Callable[[str, bytes], Any], steps: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Return outputs, or those of some steps, whose results are read by `decode`, which gets the step."""
        with self._reading() as connection:
            found = next(iter(dags.load(connection, [run])), None)
            definition = workflows.of_run(connection, run)
            if found is None or definition is None or found.state is None:
                return {}
            results = dags.results_of_run(connection, run, steps)
        state = msgspec.msgpack.decode(found.state, type=DagState)
        return {
            step.name: step_output(
                state.steps[place], state.fans.get(place), results.get(step.name, []), partial(decode, step.name)
            )
            for place, step in enumerate(definition.steps)
            if state.steps[place] != StepState.SKIPPED and (steps is None or step.name in steps)
        }

    def wait(self, run: bytes, limit: TimeLimit) -> Steps[Ended | None]:
        return self._waiting.wait(run, lambda: self._find_end(run), limit)

    def _find_end(self, run: bytes) -> Ended | None:
        state, _ = self.progress(run)
        return Ended(run, state) if state in ENDED_RUN_STATES else None

    def find_ends(self, runs: Sequence[bytes]) -> list[Ended]:
        """Return those that have ended, or do not exist."""
        with self._reading() as connection:
            states = results.run_states(connection, runs)
        found = ((run, states.get(run, MISSING)) for run in runs)
        return [Ended(run, state) for run, state in found if state in ENDED_RUN_STATES or state == MISSING]


def _noted(tasks: Iterable[NewTask], ids: list[bytes]) -> Iterator[NewTask]:
    """Yield tasks, and keep their ids."""
    for task in tasks:
        ids.append(task.id)
        yield task


_PAUSE = 0.5
"""Seconds between two looks while Redis is away."""


class RunListener:
    """Hears of one run; for one thread. It only makes a wait faster."""

    def __init__(self, connections: Connections, run: bytes) -> None:
        self._connections = connections
        self._run = run
        self._follower: Follower | None = None

    def wait(self, seconds: float) -> None:
        """Wait until the run may have changed since this was called last, or so many seconds; then look at it.

        The first time, it begins to listen, and what was looked at before may have changed already.
        """
        give_up_at = time.monotonic() + seconds
        try:
            if self._follower is None:
                follower = Follower(self._connections.shared_redis, self._connections.keys)
                follower.begin()
                self._follower = follower
                return
            while time.monotonic() < give_up_at:
                heard = self._follower.wait()
                if heard.has_gap or any(map(self._is_about, heard.entries)):
                    return
        except UNAVAILABLE:
            self._follower = None
            time.sleep(max(0.0, min(_PAUSE, give_up_at - time.monotonic())))

    def _is_about(self, entry: Entry) -> bool:
        changes = entry.changes
        return changes.is_first or any(run.id == self._run for run in changes.runs)

    def close(self) -> None:
        """Listen no more; the leader notices after a while."""
        self._follower = None
