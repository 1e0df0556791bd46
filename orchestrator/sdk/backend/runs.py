"""Calls about runs of many tasks and of DAG workflows. Some work for runs of flows and of workflows as code, too."""

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
from orchestrator.sdk.values.sealing import seal_task, task_with_stored_arguments
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

_PAGE_SIZE = 5_000
_MAX_OUTPUTS_SIZE = 1_000_000_000
"""Bytes of encoded outputs, at most. Each output was already checked against the limit of a result."""


class RunBackend(Part, RunWork):
    """Calls about runs."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._code = CodeBackend(shared)

    progress = reading_one(results.progress, lambda run: NotFound.by_id("run", to_text(run)))

    def start(self, run_id: bytes, name: str, tasks: Iterable[NewTask], *, repeated: bool = False) -> None:
        """Create a run and its tasks in one transaction. With `repeated`, an earlier try may have created them."""
        try:
            with self._connections.writing(f"run {to_text(run_id)} was stored", transaction=True) as connection:
                if repeated and results.run_states(connection, [run_id]):
                    return
                if (store := self._payloads) is not None:
                    tasks = (task_with_stored_arguments(task, store) for task in tasks)
                if (vault := self._vault) is not None:
                    tasks = (seal_task(task, vault) for task in tasks)
                ids: list[bytes] = []
                total = enqueue.copy_tasks(connection, _collecting_ids(tasks, ids) if repeated else tasks)
                if ids and results.has_ended(connection, ids):
                    raise InvalidTask("One of these ids belongs to another task: make a new id for each task.")
                if not creation.create(connection, [NewRun(run_id, name, total, trace=current_trace())]) and repeated:
                    connection.rollback()  # the first try has succeeded meanwhile
        except IntegrityError:
            if not repeated:
                raise
            self.progress(run_id)  # raises unless the run exists
        self._connections.nudge()

    def rerun(self, run: bytes, new: bytes, from_step: str | None, *, repeated: bool = False) -> None:
        with self._connections.changing(f"run {to_text(new)} was stored") as connection:
            if repeated and results.run_states(connection, [new]):
                return
            self._connections.record(connection, "rerun", "run", to_text(run), new=to_text(new), from_step=from_step)
            is_done = self._code.rerun(connection, run, new, from_step) or self._rerun_flow(
                connection, run, new, from_step
            )
            if not is_done:
                self._rerun_steps(connection, run, new, from_step)

    def _rerun_flow(self, connection: Connection, run: bytes, new: bytes, from_step: str | None) -> bool:
        """Start a new run of the same flow. Return False if the run is not one of a flow."""
        new_run = flow_runs.rerun_of(connection, run, new)
        if new_run is None:
            return False
        if from_step is not None:
            raise WrongState(
                f"Run {to_text(run)} is a run of a flow, which always starts at the beginning: omit the step. To "
                f"resume at the node that failed: orchestrator runs retry {to_text(run)}"
            )
        creation.create(connection, [dags.sealed(new_run._replace(trace=current_trace()), self._vault)])
        return True

    def _rerun_steps(self, connection: Connection, run: bytes, new: bytes, from_step: str | None) -> None:
        stored = next(iter(dags.load(connection, [run])), None)
        definition = workflows.of_run(connection, run)
        if stored is None or definition is None:
            raise WrongState(f"Run {to_text(run)} cannot be run again: it is not a run of a workflow.")
        graph = Graph(definition)
        if from_step is not None and from_step not in graph.index:
            raise InvalidWorkflow(
                f"Workflow {definition.name!r} has no task {from_step!r}.{did_you_mean(from_step, graph.index)}"
            )
        state = msgspec.msgpack.decode(stored.state, type=DagState) if stored.state is not None else None
        kept = kept_state(graph, state, from_step) if from_step is not None and state is not None else None
        new_run = dags.new_run(definition, stored.version, new, stored.params)
        new_run = new_run._replace(
            fire_time=stored.fire_time.isoformat(),
            tags=stored_json(stored.tags),
            trace=current_trace(),
            headers=stored.headers,
        )
        creation.create(connection, [dags.sealed(new_run, self._vault)])
        if kept is not None:
            names = [graph.steps[index].name for index in kept.successes]
            dags.copy_results(connection, run, new, names, msgspec.msgpack.encode(kept))
        if kept is not None or is_composed(definition.name):  # a composition's arguments may be in the payload store
            payloads.copy_keepers(connection, run, new)

    # -- requests

    def cancel(self, run: bytes) -> None:
        state, _ = self.progress(run)
        if state == RunState.CANCELLED:
            return
        ask(self._connections, RequestKind.CANCEL_RUN, run, state, allowed=state not in ENDED_RUN_STATES)

    def withhold(self, run: bytes, step: str | None) -> None:
        body = msgspec.json.encode({"step": step}).decode()
        with self._connections.changing(f"the request to withhold run {to_text(run)} was stored") as connection:
            self._connections.ask(connection, RequestKind.WITHHOLD_RUN, run, body)

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
                f"Run {to_text(run)} cannot be retried by itself: it is step {parent[1]!r} of run {parent[0]}, "
                f"and is retried with that run: orchestrator runs retry {parent[0]}"
            )

    def delete(self, run: bytes) -> None:
        if not self._connections.ask_all(RequestKind.DELETE_RUN, [run]):
            state, _ = self.progress(run)
            check_state(RequestKind.DELETE_RUN, run, state, allowed=state in ENDED_RUN_STATES)
            raise WrongState(
                f"Cannot delete run {to_text(run)} by itself: it is a child of another run and is deleted with "
                "that run, or its last tasks are still being cancelled."
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
            ends = results.run_results(connection, run, position, _PAGE_SIZE)
        return [end._replace(result=reveal(end.result), error=end.error and reveal_error(end.error)) for end in ends]

    def outputs(self, run: bytes, steps: Sequence[str] | None = None) -> dict[str, Any]:
        return self._outputs(run, lambda _, result: decode_value(result), steps)

    def stored_outputs(self, run: bytes) -> dict[str, Any]:
        """Return outputs as encoded bytes, for comparison with another run."""
        return self._outputs(run, lambda _, result: reveal(result))

    def outputs_within(
        self, run: bytes, most: int, steps: Sequence[str] | None = None
    ) -> tuple[dict[str, Any], dict[str, list[Reference]]]:
        """Return outputs with at most `most` bytes from the payload store, and the references not loaded, by step."""
        skipped: dict[str, list[Reference]] = {}
        budget = most

        def take(step: str, reference: Reference) -> bool:
            nonlocal budget
            fits = reference.size <= budget
            if fits:
                budget -= reference.size
            else:
                skipped.setdefault(step, []).append(reference)
            return fits

        return self._outputs(run, lambda step, result: decode_within(result, partial(take, step)), steps), skipped

    def encoded_outputs(self, run: bytes, steps: Sequence[str] | None = None) -> bytes:
        """Return outputs as one encoded value, with references to stored values for the caller to load."""
        what = f"The outputs of run {to_text(run)}"

        def encoded(_: str, result: bytes) -> msgspec.Raw:
            if is_reference(result):
                return msgspec.Raw(result)
            return msgspec.Raw(encode_value(decode_value(result), what, _MAX_OUTPUTS_SIZE))

        return msgspec.msgpack.encode(self._outputs(run, encoded, steps))

    def _outputs(
        self, run: bytes, decode: Callable[[str, bytes], Any], steps: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Return the outputs of all or some steps; `decode` decodes a result of a step."""
        with self._reading() as connection:
            stored = next(iter(dags.load(connection, [run])), None)
            definition = workflows.of_run(connection, run)
            if stored is None or definition is None or stored.state is None:
                return {}
            results = dags.results_of_run(connection, run, steps)
        state = msgspec.msgpack.decode(stored.state, type=DagState)
        return {
            step.name: step_output(
                state.steps[index], state.fans.get(index), results.get(step.name, []), partial(decode, step.name)
            )
            for index, step in enumerate(definition.steps)
            if state.steps[index] != StepState.SKIPPED and (steps is None or step.name in steps)
        }

    def wait(self, run: bytes, limit: TimeLimit) -> Steps[Ended | None]:
        return self._waiting.wait(run, lambda: self._find_end(run), limit)

    def _find_end(self, run: bytes) -> Ended | None:
        state, _ = self.progress(run)
        return Ended(run, state) if state in ENDED_RUN_STATES else None

    def find_ends(self, runs: Sequence[bytes]) -> list[Ended]:
        """Return the ends of runs that have ended or do not exist."""
        with self._reading() as connection:
            states = results.run_states(connection, runs)
        found = ((run, states.get(run, MISSING)) for run in runs)
        return [Ended(run, state) for run, state in found if state in ENDED_RUN_STATES or state == MISSING]


def _collecting_ids(tasks: Iterable[NewTask], ids: list[bytes]) -> Iterator[NewTask]:
    for task in tasks:
        ids.append(task.id)
        yield task


_POLL_INTERVAL = 0.5
"""Seconds between two polls while Redis is unavailable."""


class RunListener:
    """Listens for changes of one run, for one thread. It is an optimization: callers poll as well."""

    def __init__(self, connections: Connections, run: bytes) -> None:
        self._connections = connections
        self._run = run
        self._follower: Follower | None = None

    def wait(self, seconds: float) -> None:
        """Wait until the run may have changed since the last call, for `seconds` at most. Then read the run again.

        The first call only subscribes and returns: the run may have changed before.
        """
        give_up_at = time.monotonic() + seconds
        try:
            if self._follower is None:
                follower = Follower(self._connections.shared_redis, self._connections.keys)
                follower.begin()
                self._follower = follower
                return
            while time.monotonic() < give_up_at:
                update = self._follower.wait()
                if update.has_gap or any(map(self._is_about, update.entries)):
                    return
        except UNAVAILABLE:
            self._follower = None
            time.sleep(max(0.0, min(_POLL_INTERVAL, give_up_at - time.monotonic())))

    def _is_about(self, entry: Entry) -> bool:
        changes = entry.changes
        return changes.is_first or any(run.id == self._run for run in changes.runs)

    def close(self) -> None:
        """Stop listening. The leader notices after a while."""
        self._follower = None
