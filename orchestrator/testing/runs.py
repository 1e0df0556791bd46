"""The handle of a workflow run in a test."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

from orchestrator.domain.code import commands, history
from orchestrator.domain.code.activation import Query
from orchestrator.domain.code.attributes import attributes_of
from orchestrator.domain.code.history import Fact, HistoryItem
from orchestrator.domain.code.promises import Resolution, mismatch
from orchestrator.domain.ids import derived_id, to_text
from orchestrator.domain.runs import RAN_TOO_LONG, WAS_TERMINATED
from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import (
    DeterminismViolation,
    NotDeterministic,
    OrchestratorError,
    PayloadError,
    RunFailed,
    WrongState,
)
from orchestrator.sdk.code.engine import replay
from orchestrator.sdk.code.handle import W_co
from orchestrator.sdk.code.messages import (
    QueryMethod,
    SignalMethod,
    UpdateMethod,
    answer_of,
    name_of,
    next_try,
    raised,
    request_id,
    signal_value,
)
from orchestrator.sdk.code.recording import Recording
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.sdk.values.payload import decode_value, encode_call, encode_value
from orchestrator.testing.leader import MemoryLeader
from orchestrator.testing.memory_run import Run

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class World(Protocol):
    """The environment of a run in a test."""

    leader: MemoryLeader

    async def settle(self) -> None:
        """Process everything that can happen without time passing."""

    async def skip_to_next(self) -> bool:
        """Fire the next timer and process its consequences. Return False if there is none."""


class TestedRun(Generic[R, W_co]):
    """A run in a test. When a call that sends a message returns, the run has processed the message."""

    __test__ = False

    def __init__(self, world: World, workflow: CodeWorkflow[..., R, W_co], run: Run) -> None:
        self._world = world
        self._workflow = workflow
        self._first = run
        self._limit = workflow._client.settings.max_payload
        self._message_id: str | None = None
        self._signalled: set[str] = set()
        self._original_id = run.id

    def options(self, *, id: str | None = None) -> TestedRun[R, W_co]:
        """Return a copy of this handle that gives the next signal or update an id, under which it is applied once."""
        changed = copy.copy(self)
        changed._message_id = id
        return changed

    @property
    def _run(self) -> Run:
        run = self._first
        while run.next is not None:
            run = run.next
        return run

    def _chain(self) -> Iterator[Run]:
        """Yield the chain of continued runs, except those that were reset before their end."""
        run: Run | None = self._first
        while run is not None:
            if not run.was_reset:
                yield run
            run = run.next

    @property
    def id(self) -> str:
        return to_text(self._first.id)

    @property
    def history(self) -> Recording:
        """The history of the latest run in the chain."""
        return Recording(self._run.id, list(self._run.history))

    @property
    def state(self) -> dict[str, Any]:
        """The values that the code has set and not cleared."""
        return {key: decode_value(value) for key, value in self._run.state.items()}

    @property
    def attributes(self) -> dict[str, Any]:
        return attributes_of(event.what for event in self._run.history)

    async def result(self) -> R:
        """Let time pass until the run has ended, and return its result. Raise RunFailed if it did not succeed."""
        while self._run.end is None:
            self._check_stuck()
            if not await self._world.skip_to_next() and self._run.end is None:
                self._check_stuck()
                raise OrchestratorError(
                    f"Workflow {self._workflow.name!r} waits for something outside the workflow, and nothing "
                    f"else can happen ({'; '.join(self._run.places)}). Start it with start(…), and signal it or "
                    "resolve its promises: "
                    f"{', '.join(sorted(self._run.promises.values())) or 'it has none open'}."
                )
        for run in self._chain():
            await asyncio.to_thread(replay, self._workflow, Recording(run.id, list(run.history)), exactly=True)
        match self._run.end:
            case commands.CompleteRun(result=data):
                result: R = self._workflow._signature.restore_result(decode_value(data))
                return result
            case commands.FailRun(error=error):
                text = f"Workflow {self._workflow.name!r} failed: {error.kind}: {error.message}\n\n{error.traceback}"
                raise RunFailed(text, kind=error.kind, data=error.attributes)
            case _ if self._run.timed_out:
                text = f"{RAN_TOO_LONG.kind}: {RAN_TOO_LONG.message}"
                raise RunFailed(f"Workflow {self._workflow.name!r} failed: {text}")
            case _ if self._run.terminated:
                raise RunFailed(f"Workflow {self._workflow.name!r} was terminated.", kind=WAS_TERMINATED.kind)
            case _:
                raise RunFailed(f"Workflow {self._workflow.name!r} was cancelled.")

    @overload
    async def signal(self, signal: str, /, value: Any = None) -> None: ...
    @overload
    async def signal(self, signal: SignalMethod[W_co, P, Any], /, *args: P.args, **kwargs: P.kwargs) -> None: ...

    async def signal(self, signal: str | SignalMethod[Any, ..., Any], /, *args: Any, **kwargs: Any) -> None:
        name, value = signal_value(signal, args, kwargs, self._limit, self._workflow._signature)
        if self._message_id is not None and self._message_id in self._signalled:
            return
        self._signalled.update([self._message_id] if self._message_id is not None else ())
        await self._send(history.SignalReceived(name, encode_value(value, f"Signal {name!r}", self._limit)))

    async def resolve(self, promise: str, value: Any = None) -> None:
        """Resolve the oldest open promise of this name. If none is open, the value is kept for the next one."""
        data = encode_value(value, f"Promise {promise!r}", self._limit)
        created = [event.what for event in self._run.history if isinstance(event.what, history.PromiseCreated)]
        if problem := mismatch(created, self._run.promises.keys(), promise, decode_value(data)):
            raise PayloadError(f"Promise {promise!r}: {problem}. Nothing was sent.")
        await self._settle(Resolution(promise, data))

    async def reject(self, promise: str, reason: str) -> None:
        """Reject the oldest open promise of this name. If none is open, the rejection is kept for the next one."""
        await self._settle(Resolution(promise, error=TaskError("PromiseRejected", reason)))

    async def cancel(self, reason: str = "") -> None:
        await self._send(history.RunCancelRequested(reason))

    async def terminate(self) -> None:
        """End the run without running its code."""
        self._check_open()
        self._run.terminated = True
        self._world.leader.end(self._run, commands.CancelRun())
        await self._world.settle()

    async def reset(self, to: int) -> TestedRun[R, W_co]:
        """Start a new run that repeats this one up to an event of its history and continues from there."""
        new = self._world.leader.reset(self._run, to)
        await self._world.settle()
        copied_handle = TestedRun(self._world, self._workflow, new)
        copied_handle._signalled, copied_handle._original_id = set(self._signalled), self._original_id
        return copied_handle

    @overload
    async def query(self, query: str, /, *args: Any, **kwargs: Any) -> Any: ...
    @overload
    async def query(self, query: QueryMethod[W_co, P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    async def query(self, query: str | QueryMethod[Any, ..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Send a query and return its answer."""
        name = name_of(QueryMethod, query, self._workflow._signature)
        question = Query(derived_id(self._run.id, "query"), name, encode_call(name, args, kwargs, self._limit, "query"))
        answers = await asyncio.to_thread(self._world.leader.activate, self._run, [question])
        if not answers:
            raise WrongState(
                f"Workflow {self._workflow.name!r} ended before its code ran, so it cannot answer queries."
            )
        answer = answers[0]
        return answer_of(query, _value(f"Query {name!r}", answer.result, answer.error))

    @overload
    async def update(self, update: str, /, *args: Any, **kwargs: Any) -> Any: ...
    @overload
    async def update(self, update: UpdateMethod[W_co, P, Any, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    async def update(self, update: str | UpdateMethod[Any, ..., Any, Any], /, *args: Any, **kwargs: Any) -> Any:
        """Send an update and return its answer, without time passing."""
        return (await self.start_update(update, *args, **kwargs)).result()

    @overload
    async def start_update(self, update: str, /, *args: Any, **kwargs: Any) -> TestedUpdate[Any]: ...
    @overload
    async def start_update(
        self, update: UpdateMethod[W_co, P, Any, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> TestedUpdate[T]: ...

    async def start_update(self, update: str | UpdateMethod[Any, ..., Any, Any], /, *args: Any, **kwargs: Any) -> Any:
        """Send an update that may take time."""
        name = name_of(UpdateMethod, update, self._workflow._signature)
        run, id = self._run, self._message_id
        message_id = None if id is None else request_id(self._original_id, "update", id)
        facts = [*self._facts()]
        refused = {fact.id for fact in facts if isinstance(fact, history.UpdateAnswered) and fact.was_refused}
        sent = {fact.id for fact in facts if isinstance(fact, history.UpdateRequested)}
        # A refused update was not applied, and may be sent again.
        while message_id is not None and (message_id in refused or next_try(message_id) in sent):
            message_id = next_try(message_id)
        identifier = message_id or derived_id(run.id, "update", len(run.history))
        request = history.UpdateRequested(identifier, name, encode_call(name, args, kwargs, self._limit, "update"))
        if identifier not in sent:
            await self._send(request)
        return TestedUpdate(self._first, update, identifier)

    def _facts(self) -> Iterator[HistoryItem]:
        for run in self._chain():
            yield from (event.what for event in run.history)

    async def _settle(self, resolution: Resolution) -> None:
        self._check_open()
        if not self._world.leader.settle_promise(self._run, resolution):
            raise WrongState(
                f"No promise {resolution.name!r} is open: it was resolved, rejected or given up before. "
                f"Open: {', '.join(self._run.promises.values()) or 'none'}."
            )
        await self._world.settle()
        self._check_stuck()

    async def _send(self, fact: Fact) -> None:
        self._check_open()
        self._world.leader.append(self._run, fact)
        await self._world.settle()
        self._check_stuck()

    def _check_open(self) -> None:
        if self._run.end is not None:
            raise WrongState(
                f"Workflow {self._workflow.name!r}, run {to_text(self._run.id)}, {_end_text(self._run.end)}."
            )

    def _check_stuck(self) -> None:
        stuck = self._run.stuck
        if stuck is not None and stuck.kind == NotDeterministic.__name__:
            raise NotDeterministic(stuck.message)
        if stuck is not None:
            raise DeterminismViolation(stuck.message, stuck.event, stuck.difference)


class TestedUpdate(Generic[R]):
    """An update that was sent to a run in a test."""

    __test__ = False

    def __init__(self, run: Run, update: str | UpdateMethod[Any, ..., Any, R], identifier: bytes) -> None:
        self._run = run
        self._update = update
        self._id = identifier

    def result(self) -> R:
        """Return the answer. Raise an error if there is none yet: no time passes."""
        name = name_of(UpdateMethod, self._update, None)
        run = self._run
        while run.next is not None and (self._id not in run.answers or run.was_reset):  # the update came too late
            run = run.next
        if self._id not in run.answers:
            raise OrchestratorError(
                f"Update {name!r} has no answer yet: the code has no handler of this name so far, or the handler "
                "waits for time to pass or for another event."
            )
        answer = run.answers[self._id]
        value: R = answer_of(self._update, _value(f"Update {name!r}", answer.result, answer.error))
        return value


def _end_text(end: commands.EndCommand) -> str:
    return f"has failed: {end.error.kind}: {end.error.message}" if isinstance(end, commands.FailRun) else "has ended"


def _value(description: str, result: bytes | None, error: TaskError | None) -> bytes:
    if error is not None:
        raise raised(description, error)
    return result or b"\xc0"
