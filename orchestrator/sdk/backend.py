"""The client's connections, opened on first use: Postgres to write and read, Redis to be quick about it.

This is the one module of the SDK that loads the store. A worker process never needs it, and so never pays for
SQLAlchemy and a database driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, Engine, exc

from orchestrator.domain.dag import DagState, Graph, kept_state
from orchestrator.domain.definition import Definition, check_size, resolve_params
from orchestrator.domain.ids import time_ordered_id, to_text
from orchestrator.domain.limits import Rate
from orchestrator.domain.plain import unstorable
from orchestrator.domain.run import RunCounters
from orchestrator.domain.states import ENDED_RUN_STATES, ENDED_TASK_STATES, TaskState
from orchestrator.domain.task import NewTask
from orchestrator.errors import (
    Duplicate,
    InvalidTask,
    InvalidWorkflow,
    NotFound,
    PayloadError,
    SchemaError,
    Unavailable,
    Uncertain,
    WrongState,
    did_you_mean,
)
from orchestrator.sdk.code.client import CodeClient
from orchestrator.sdk.payload import decode_value
from orchestrator.sdk.progress import TaskProgress, read_progress
from orchestrator.sdk.schedule_backend import ScheduleBackend
from orchestrator.settings import Settings
from orchestrator.store import dags, database, enqueue, inbox, queues, redrive, results, revival, unique, workflows
from orchestrator.store.inbox import Wish
from orchestrator.store.namespaces import borrowed
from orchestrator.store.redrive import FailedFilter
from orchestrator.telemetry import Outage, first_line, get_logger
from orchestrator.transport.client import Announcements, Nudges
from orchestrator.transport.codec import Ended
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys

log = get_logger("client")

_LOOK_AGAIN = 5.0
"""Seconds after which a waiter looks in Postgres although nothing was announced."""

_LOOK_AT_ONCE = 5_000
"""Tasks that one query asks for."""

T = TypeVar("T")
Look = Callable[[], "Ended | None"]


class Backend:
    """Writes tasks and requests, nudges the leader, waits for results."""

    def __init__(self, settings: Settings) -> None:
        self._keys = Keys(settings.namespace)
        self._redis = connect(settings.require_redis())
        self._nudges = Nudges(settings.require_redis(), self._keys)
        self._max_payload = settings.max_payload
        url, name = settings.require_database(), "orchestrator client"
        self._namespace = settings.namespace
        self._engine = database.engine_for(url, autocommit=True, name=name, namespace=settings.namespace)
        # A pool of its own: changing the mode of a connection that had died would leave it in the pool, dead for ever.
        self._transactions = database.engine_for(url, name=name, namespace=settings.namespace)
        self._announcements = Announcements(connect(settings.require_redis()), self._keys)
        self.code = CodeClient(self, settings.max_payload)
        """Runs of workflows as code."""
        self.schedules = ScheduleBackend(self._open, self._nudges.send)
        self._postgres = Outage(log, "Postgres", "those who wait for results go on waiting")

    def close(self) -> None:
        """Close every connection."""
        self._announcements.close()
        self._nudges.close()
        self._redis.close()
        self._engine.dispose()
        self._transactions.dispose()

    # -- writing

    def enqueue(self, task: NewTask) -> bytes:
        """Create one task; return its id, or that of the task which has its key."""
        with self._writing(f"task {to_text(task.id)} was stored") as connection:
            if task.unique is None:
                enqueue.insert_task(connection, task)
                created = task.id
            else:
                created = unique.insert_unique(connection, task, task.unique)
        self._nudges.send()
        return created

    def enqueue_in(self, connection: Connection, task: NewTask) -> bytes:
        """Create one task in the caller's transaction, whose commit wakes the scheduler."""
        if task.unique is not None and task.unique.on_duplicate == "replace":
            raise InvalidTask(
                "Option on_duplicate: 'replace' does not go with enqueue_in, because the scheduler would have to wait "
                "for your transaction. Use 'return' or 'raise'."
            )
        with borrowed(connection, self._namespace):
            created = _insert_in(connection, task)
        enqueue.notify_on_commit(connection, self._namespace)
        return created

    def enqueue_many(self, tasks: Sequence[NewTask]) -> list[bytes]:
        """Create many tasks, all or none; return their ids, or those of the tasks which have their keys."""
        with self._writing("the tasks were stored, all of them or none", transaction=True) as connection:
            if any(task.unique is not None for task in tasks):
                # In the order of their keys: two such calls that share some cannot then wait for each other.
                in_order = sorted(tasks, key=lambda task: task.unique.key if task.unique else "")
                created = {task.id: _insert_in(connection, task) for task in in_order}
            else:
                enqueue.copy_tasks(connection, tasks)
                created = {task.id: task.id for task in tasks}
        self._nudges.send()
        return [created[task.id] for task in tasks]

    def start_run(self, run_id: bytes, name: str, tasks: Iterable[NewTask]) -> None:
        """Create a run and its tasks, all or none."""
        with self._writing(f"run {to_text(run_id)} was stored", transaction=True) as connection:
            total = enqueue.copy_tasks(connection, tasks)
            enqueue.insert_run(connection, run_id, name, total)
        self._nudges.send()

    def apply_workflow(self, definition: Definition) -> workflows.Application:
        """Store a definition."""
        with self._writing(f"workflow {definition.name!r} was stored", transaction=True) as connection:
            application = workflows.apply(connection, definition)
        if definition.schedule is not None:
            self._nudges.send()
        return application

    def delete_workflow(self, name: str) -> bool:
        """Delete a workflow and its schedules; False if there is none."""
        with self._writing(f"workflow {name!r} was deleted") as connection:
            return workflows.delete(connection, name)

    def start_workflow(
        self, name: str, params: Mapping[str, Any], run_id: bytes, *, key: str | None, tags: Iterable[str]
    ) -> bytes:
        """Create a run of the newest version of a workflow; return its id, or that of the run that has the key."""
        stored = self.workflow(name)
        resolved = resolve_params(stored.definition, params, datetime.now(UTC))
        run = dags.new_run(stored.definition, stored.version, run_id, resolved)
        run = run._replace(key=key, tags=(*run.tags, *tags))
        check_size(run.params, f"The parameters of workflow {name!r}", self._max_payload)
        with self._writing(f"run {to_text(run_id)} was stored") as connection:
            if not dags.start(connection, [run]) and key is not None:
                run_id = dags.find_by_key(connection, key) or run_id
        self._nudges.send()
        return run_id

    def post_event(self, event_id: bytes, name: str, payload: Any, limit: int) -> None:
        """Tell the leader that something happened."""
        if problem := unstorable(payload):
            raise PayloadError(f"The payload of event {name!r} cannot be kept as JSON: {problem}.")
        body = msgspec.json.encode({"name": name, "payload": payload})
        if len(body) > limit:
            raise PayloadError(
                f"The payload of event {name!r} has {len(body):,} bytes, and at most {limit:,} are allowed. "
                f"Pass a reference to the data instead, or raise the setting max_payload."
            )
        with self._writing(f"event {name!r} was stored") as connection:
            inbox.add(connection, Wish.EVENT, event_id, body.decode())
        self._nudges.send()

    def rerun(self, run: bytes, new: bytes, from_step: str | None) -> None:
        """Start a run over, with the same version and parameters; keep what is not below `from_step`."""
        with self._writing(f"run {to_text(new)} was stored", transaction=True) as connection:
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
            dags.start(connection, [again._replace(fire_time=found.fire_time.isoformat())])
            if kept is not None:
                names = [graph.steps[place].name for place in kept.successes]
                dags.keep(connection, run, new, names, msgspec.msgpack.encode(kept))
        self._nudges.send()

    def cancel_task(self, task: bytes) -> None:
        """Ask the leader to cancel a task."""
        self._ask(Wish.CANCEL_TASK, task, self.task_status(task), ENDED_TASK_STATES, wanted=False)

    def retry_task(self, task: bytes) -> None:
        """Ask the leader to open a failed task again, unless another has taken its key meanwhile."""
        with self._reading() as connection:
            held = revival.other_holder(connection, task)
        if held is not None:
            key, holder = held
            raise Duplicate(
                f"Cannot retry task {to_text(task)}: task {holder} has its key {key!r} now. Wait until that one has "
                f"ended, or cancel it.",
                holder,
            )
        self._ask(Wish.RETRY_TASK, task, self.task_status(task), ("failed", "skipped"), wanted=True)

    def retry_failed(self, wanted: FailedFilter) -> int:
        """Ask the leader to open the failed tasks again that match; return how many match now."""
        with self._writing("the request to retry failed tasks was stored") as connection:
            count = sum(group.tasks for group in redrive.preview(connection, wanted))
            if count:
                redrive.ask(connection, wanted)
        self._nudges.send()
        return count

    def cancel_run(self, run: bytes) -> None:
        """Ask the leader to cancel a run."""
        self._ask(Wish.CANCEL_RUN, run, self.run_progress(run)[0], ENDED_RUN_STATES, wanted=False)

    def retry_run(self, run: bytes) -> None:
        """Ask the leader to open a run's failed tasks again, or to let a stuck run try again."""
        if self.code.retry(run):
            return
        self._ask(Wish.RETRY_RUN, run, self.run_progress(run)[0], ("failed",), wanted=True)

    def _ask(self, wish: Wish, target: bytes, state: str, states: Iterable[str], *, wanted: bool) -> None:
        if (state in tuple(states)) is not wanted:
            verb, what = wish.split(" ")
            raise WrongState(f"Cannot {verb} {what} {to_text(target)}: it is in state {state!r}.")
        with self._writing(f"the request to {wish} {to_text(target)} was stored") as connection:
            inbox.add(connection, wish, target)
        self._nudges.send()

    # -- queues

    def pause_queue(self, name: str, paused: bool) -> None:
        """Keep a queue's tasks from being handed out, or let them go again."""
        with self._writing(f"queue {name!r} was paused or resumed", transaction=True) as connection:
            queues.set_paused(connection, name, paused)
        self._nudges.send()

    def limit_queue(self, name: str, concurrency: int | None, rate: Rate | None) -> None:
        """Set or lift a queue's limits."""
        with self._writing(f"queue {name!r} was limited", transaction=True) as connection:
            queues.set_limits(connection, name, concurrency, rate)
        self._nudges.send()

    def retain_queue(self, name: str, success: float | None, failed: float | None) -> None:
        """Set how long a queue's tasks are kept after they have ended."""
        with self._writing(f"the retention of queue {name!r} was stored") as connection:
            queues.set_retention(connection, name, success, failed)

    def purge_queue(self, name: str) -> None:
        """Cancel what waits in a queue."""
        with self._writing(f"the request to purge queue {name!r} was stored") as connection:
            queues.ask_purge(connection, name)
        self._nudges.send()

    def open_tasks(self, queue: str) -> int:
        """Return how many tasks of a queue have not ended."""
        with self._reading() as connection:
            return queues.open_tasks(connection, queue)

    # -- reading

    def task_status(self, task: bytes) -> str:
        """Return a task's state."""
        return self._outcome(task).status

    def task_progress(self, task: bytes) -> TaskProgress | None:
        """Return how far a task says it has come."""
        return read_progress(self._redis, self._keys, task)

    def run_progress(self, run: bytes) -> tuple[str, RunCounters]:
        """Return a run's state and counters."""
        with self._reading() as connection:
            found = results.progress(connection, run)
        if found is None:
            raise NotFound.by_id("run", to_text(run))
        return found

    def workflow(self, name: str) -> workflows.Stored:
        """Return the newest version of a workflow."""
        with self._reading() as connection:
            stored = workflows.latest(connection, name)
            if stored is None:
                names = [other.name for other in workflows.list_latest(connection)]
                raise NotFound(
                    f"There is no workflow {name!r}.{did_you_mean(name, names)} "
                    f"Apply it with `orchestrator workflows apply FILE`."
                )
        return stored

    def workflow_names(self) -> list[str]:
        """Return the names of all workflows."""
        with self._reading() as connection:
            return [stored.name for stored in workflows.list_latest(connection)]

    def fan_outs(self, run: bytes) -> set[str]:
        """Return the names of the steps of a run that fan out."""
        with self._reading() as connection:
            definition = workflows.of_run(connection, run)
        steps = definition.steps if definition is not None else ()
        return {step.name for step in steps if step.foreach is not None or step.parallel is not None}

    def step_results(self, run: bytes) -> list[tuple[str, int, bytes | None]]:
        """Return step, position and result of every ended task of a workflow's run."""
        with self._reading() as connection:
            return dags.results_of_run(connection, run)

    def run_results(self, run: bytes) -> Iterator[bytes]:
        """Yield the results of a run's tasks in order."""
        with self._reading() as connection:
            yield from results.run_results(connection, run)

    def _outcome(self, task: bytes) -> results.TaskOutcome:
        with self._reading() as connection:
            found = results.outcome(connection, task)
        if found is None:
            raise NotFound.by_id("task", to_text(task))
        return found

    # -- waiting

    def wait_task(self, task: bytes, timeout: float | None) -> Ended | None:
        """Wait until a task ends; None if it has not by then."""
        return self._wait(task, lambda: self._look_at_task(task), timeout)

    async def wait_task_async(self, task: bytes, timeout: float | None) -> Ended | None:
        """Do the same as `wait_task` on the event loop."""
        return await self._wait_async(task, lambda: self._look_at_task(task), timeout)

    def wait_tasks(self, tasks: Sequence[bytes], timeout: float | None) -> Iterator[Ended]:
        """Yield tasks as they end, those that have ended already first; stop when the time is up."""
        deadline = None if timeout is None else time.monotonic() + timeout
        woken = threading.Event()
        heard: deque[Ended | None] = deque()

        def wake(ended: Ended | None) -> None:
            heard.append(ended)
            woken.set()

        left = dict.fromkeys(tasks)
        try:
            for task in left:
                self._announcements.listen(task, wake)
            heard.append(None)  # whatever ended before, nobody announces again
            while left:
                for ended in self._ends(left, heard):
                    del left[ended.id]
                    self._announcements.forget(ended.id, wake)
                    yield ended
                patience = _LOOK_AGAIN if deadline is None else min(_LOOK_AGAIN, deadline - time.monotonic())
                if not left or patience <= 0:
                    return
                if not woken.wait(patience):
                    heard.append(None)
                woken.clear()
        finally:
            for task in left:
                self._announcements.forget(task, wake)

    def _ends(self, left: Mapping[bytes, None], heard: deque[Ended | None]) -> list[Ended]:
        """Return those that have ended, from what was announced or, where that does not say it all, from Postgres."""
        ends: dict[bytes, Ended] = {}
        unclear: dict[bytes, None] = {}
        while heard:
            ended = heard.popleft()
            if ended is None:
                unclear.update(left)
            elif _is_complete(ended):
                ends[ended.id] = ended
            else:
                unclear[ended.id] = None
        ask = [task for task in unclear if task in left and task not in ends]
        for start in range(0, len(ask), _LOOK_AT_ONCE):
            some = ask[start : start + _LOOK_AT_ONCE]
            found = self._try(partial(self._outcomes, some))
            if found is None:
                break  # the next look asks for all of them
            for task in some:
                outcome = found.get(task)
                if outcome is None:
                    raise NotFound.by_id("task", to_text(task))
                if outcome.status in ENDED_TASK_STATES:
                    ends[task] = Ended(task, outcome.status, outcome.result, outcome.error)
        return [ended for task, ended in ends.items() if task in left]

    def _outcomes(self, tasks: Sequence[bytes]) -> Mapping[bytes, results.TaskOutcome]:
        with self._reading() as connection:
            return results.outcomes(connection, tasks)

    def wait_run(self, run: bytes, timeout: float | None) -> Ended | None:
        """Wait until a run ends; None if it has not by then."""
        return self._wait(run, lambda: self._look_at_run(run), timeout)

    def _look_at_task(self, task: bytes) -> Ended | None:
        found = self._outcome(task)
        if found.status in ENDED_TASK_STATES:
            return Ended(task, found.status, found.result, found.error)
        return None

    def _look_at_run(self, run: bytes) -> Ended | None:
        status, _ = self.run_progress(run)
        return Ended(run, status) if status in ENDED_RUN_STATES else None

    def _wait(self, identifier: bytes, look: Look, timeout: float | None) -> Ended | None:
        """Subscribe, then look, and look again whenever something may have been missed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        woken = threading.Event()
        heard: list[Ended | None] = []

        def wake(ended: Ended | None) -> None:
            heard.append(ended)
            woken.set()

        self._announcements.listen(identifier, wake)
        try:
            found = self._try(look)
            while found is None:
                left = _LOOK_AGAIN if deadline is None else min(_LOOK_AGAIN, deadline - time.monotonic())
                if left <= 0:
                    return None
                woken.wait(left)
                woken.clear()
                found = _complete(heard) or self._try(look)
            return found
        finally:
            self._announcements.forget(identifier, wake)

    async def _wait_async(self, identifier: bytes, look: Look, timeout: float | None) -> Ended | None:
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        woken = asyncio.Event()
        heard: list[Ended | None] = []

        def wake(ended: Ended | None) -> None:
            heard.append(ended)
            loop.call_soon_threadsafe(woken.set)

        await asyncio.to_thread(self._announcements.listen, identifier, wake)
        try:
            found = await asyncio.to_thread(self._try, look)
            while found is None:
                left = _LOOK_AGAIN if deadline is None else min(_LOOK_AGAIN, deadline - loop.time())
                if left <= 0:
                    return None
                with contextlib.suppress(TimeoutError):  # then it is time to look again
                    await asyncio.wait_for(woken.wait(), left)
                woken.clear()
                found = _complete(heard) or await asyncio.to_thread(self._try, look)
            return found
        finally:
            self._announcements.forget(identifier, wake)

    # -- for runs of code

    @staticmethod
    def new_id() -> bytes:
        """Return a new id."""
        return time_ordered_id(time.time_ns() // 1_000_000, os.urandom(10))

    def nudge(self) -> None:
        """Tell the leader that something is new."""
        self._nudges.send()

    def wait(self, identifier: bytes, look: Look, timeout: float | None) -> Ended | None:
        """Wait until `look` finds an end, or one is announced."""
        return self._wait(identifier, look, timeout)

    async def wait_async(self, identifier: bytes, look: Look, timeout: float | None) -> Ended | None:
        """Do the same as `wait` on the event loop."""
        return await self._wait_async(identifier, look, timeout)

    def connected(self, *, transaction: bool = False) -> AbstractContextManager[Connection]:
        """Open a connection whose errors a caller can act on."""
        return self._open(transaction=transaction)

    def _try(self, look: Callable[[], T]) -> T | None:
        """Look; while Postgres is away, nothing has ended that anyone could know of, and the wait goes on."""
        try:
            found = look()
        except Unavailable as error:
            self._postgres.failed(first_line(error))
            return None
        self._postgres.worked()
        return found

    def _reading(self) -> AbstractContextManager[Connection]:
        return self._connected(self._engine, "")

    @contextlib.contextmanager
    def _writing(self, what: str, *, transaction: bool = False) -> Iterator[Connection]:
        """Open a connection to write: one statement, or as many as the transaction needs. `what` is then done."""
        with self._connected(self._transactions if transaction else self._engine, what) as connection:
            if transaction:
                with connection.begin():
                    yield connection
            else:
                yield connection

    def _open(self, *, transaction: bool = False) -> AbstractContextManager[Connection]:
        return self._connected(self._transactions if transaction else self._engine, "the change was stored")

    @contextlib.contextmanager
    def _connected(self, engine: Engine, written: str) -> Iterator[Connection]:
        """Open a connection whose errors a caller can act on."""
        try:
            with engine.connect() as connection:
                yield connection
        except exc.ProgrammingError as error:
            if f"{self._namespace}." in str(error.orig):
                raise SchemaError(database.no_tables(self._namespace)) from error
            raise
        except exc.SQLAlchemyError as error:
            if not database.is_outage(error):
                raise
            reason = database.explain(error)
            if written and database.is_broken_off(error):
                raise Uncertain(
                    f"The connection to Postgres broke, and it is not known whether {written}: {reason}"
                ) from error
            raise Unavailable(f"Postgres cannot be used: {reason}") from error


def _insert_in(connection: Connection, task: NewTask) -> bytes:
    """Create one task in a transaction that may last."""
    if task.unique is None:
        enqueue.insert_task(connection, task)
        return task.id
    unique.wait_for_key(connection, task.unique)
    return unique.insert_unique(connection, task, task.unique)


def _complete(heard: list[Ended | None]) -> Ended | None:
    """Return an announcement that says everything, so that Postgres need not be asked."""
    for ended in heard:
        if ended is not None and _is_complete(ended):
            return ended
    heard.clear()
    return None


def _is_complete(ended: Ended) -> bool:
    """Say whether an announcement can be read; anyone may publish anything, and Postgres has the real end."""
    if ended.state != TaskState.SUCCESS or ended.result is None:
        return ended.state != TaskState.SUCCESS
    try:
        decode_value(ended.result)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return True
