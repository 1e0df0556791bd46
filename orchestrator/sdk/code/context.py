"""The context of a workflow's code: everything it may use besides plain asyncio."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar, overload
from uuid import UUID

from orchestrator.domain.code import commands
from orchestrator.domain.code.attributes import Scalar, as_json, checked, stored
from orchestrator.domain.ids import derived_id
from orchestrator.errors import OperationFailed
from orchestrator.sdk.checks import check_name, check_text
from orchestrator.sdk.code.commander import Commander
from orchestrator.sdk.code.endings import Compensations, ContinueAsNew
from orchestrator.sdk.code.futures import DurableFuture, HeldFuture, SleepFuture
from orchestrator.sdk.code.handlers import Handlers
from orchestrator.sdk.code.operations import call
from orchestrator.sdk.code.scope import RunRandom, is_awaitable, outside, read_only
from orchestrator.sdk.code.signals import Signals
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.sdk.tasks.failure import describe
from orchestrator.sdk.tasks.signature import return_type
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values.conversion import schema_of
from orchestrator.sdk.values.payload import convert, decode_value, encode_call, encode_value

T = TypeVar("T")
_LONG_HISTORY = 10_000
"""Events after which `continue_as_new` is suggested."""
_LARGE_HISTORY = 20_000_000
"""Bytes of values in the history after which `continue_as_new` is suggested."""
_OLD_HISTORY = 30 * 86_400.0
"""Seconds after which `should_continue_as_new` is true, so that no run keeps an old version of its code forever."""
_MIN_PAUSE, _MAX_PAUSE = 0.1, 2.0
"""The shortest and longest pause between attempts of a side effect, in seconds."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Information about a run."""

    run_id: UUID
    """The id of the run, as in its handle."""
    workflow: str
    """The name of the workflow."""
    version: int
    """The version of the code with which the run was started."""
    queue: str
    """The queue in which the code runs."""
    started_at: datetime
    """The time of the start. The code begins later if the run was queued."""
    parent_id: UUID | None
    """The run that started this one as its child."""
    continued_from: UUID | None
    """The run that continued as this one."""
    history_length: int
    """The number of events so far."""
    continue_suggested: bool
    """Whether the history is long or large: `continue_as_new` would make replays short again."""


class WorkflowContext:
    """The first argument of every workflow."""

    def __init__(
        self, commander: Commander, workflow: CodeWorkflow[..., Any], handlers: Handlers, compensations: Compensations
    ) -> None:
        self._commander = commander
        self._workflow = workflow
        self._handlers = handlers
        self._compensations = compensations
        self._state: dict[str, bytes] = {}
        self._attributes: dict[str, Scalar] | None = None
        self._patches: dict[str, bool] = {}
        self._uuids = 0
        self.random: random.Random = RunRandom(commander)
        """A random number generator seeded by the run: it returns the same numbers on every replay."""
        self.logger = _Logger(commander)
        """A logger that is silent during replay."""

    # -- waiting

    @overload
    def schedule(
        self, target: Task[..., T] | CodeWorkflow[..., T], /, *args: Any, **kwargs: Any
    ) -> asyncio.Future[T]: ...
    @overload
    def schedule(self, target: str, /, *args: Any, **kwargs: Any) -> asyncio.Future[Any]: ...

    def schedule(self, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Schedule a task or a child workflow, given as an object or by name. The future is available immediately."""
        if isinstance(target, str):
            return self._workflow._registry.find(target).schedule(*args, **kwargs)
        return target.schedule(*args, **kwargs)

    def sleep(self, seconds: float | timedelta = 0.0, *, name: str = "", **parts: float) -> asyncio.Future[None]:
        """Start a durable timer: `await ctx.sleep(30)`, a timedelta, or its parts: `ctx.sleep(hours=24)`."""
        delay = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        check_text("The name of ctx.sleep", name)
        return SleepFuture(self._commander, delay + timedelta(**parts).total_seconds(), name)

    @overload
    def promise(self, name: str, *, type: type[T], timeout: float | timedelta | None = None) -> asyncio.Future[T]: ...
    @overload
    def promise(self, name: str, *, timeout: float | timedelta | None = None) -> asyncio.Future[Any]: ...

    def promise(self, name: str, *, type: Any = Any, timeout: float | timedelta | None = None) -> asyncio.Future[Any]:
        """Return the future of a new promise, which another program settles. Raise TimeoutError after `timeout`."""
        commander = self._commander
        check_name("promise", name)
        ordinal, identifier = commander.next("promise")
        commander.issue(commands.CreatePromise(ordinal, identifier, name, schema_of(type)))
        cancel = commands.CancelPromise(identifier)
        restore = partial(convert, kind=type)
        future = DurableFuture(commander, identifier, f"Promise {name!r}", restore, cancel)
        if timeout is not None:
            future.expire_after(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)
        return future

    @overload
    def signals(self, name: str, *, type: type[T]) -> Signals[T]: ...
    @overload
    def signals(self, name: str) -> Signals[Any]: ...

    def signals(self, name: str, *, type: Any = Any) -> Signals[Any]:
        """Return the signals of a name in order of arrival, including those that have already arrived."""
        self._handlers.argument_names.setdefault(("signal", name), ["value"])
        return Signals(self._commander.mailbox(check_name("signal", name)), type)

    async def wait_condition(
        self, predicate: Callable[[], object], *, timeout: float | timedelta | None = None
    ) -> None:
        """Wait until `predicate()` is true. Raise TimeoutError after `timeout`.

        It is called whenever the code has processed an event and has nothing left to do. It must not change anything.
        """

        def is_met() -> bool:
            with read_only(self._commander, "condition of ctx.wait_condition"):
                value = predicate()
            if is_awaitable(value):
                raise TypeError(
                    "ctx.wait_condition: expected a plain function that returns true or false, found an async one, "
                    "whose call is always true."
                )
            return bool(value)

        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if seconds is not None and seconds <= 0 and is_met():
            return
        async with asyncio.timeout(seconds):
            await self._commander.loop.wait_until(is_met)

    # -- handlers

    def query(self, function: Callable[..., Any] | str | None = None) -> Any:
        """Register a query handler: `@ctx.query`, or `@ctx.query("name")`. The handler must not change anything."""
        return _decorated(function, self._handlers.add_query)

    def update(
        self, function: Callable[..., Any] | str | None = None, *, validate: Callable[..., Any] | None = None
    ) -> Any:
        """Register an update handler. `validate` gets the same arguments first, and refuses the update by raising."""
        return _decorated(function, lambda name, handler: self._handlers.add_update(name, handler, validate))

    def signal(self, function: Callable[..., Any] | str | None = None) -> Any:
        """Register a signal handler. It gets the values of all signals of its name, including earlier ones.

        If the handler raises, the run fails.
        """
        return _decorated(function, self._handlers.add_signal)

    @property
    def all_handlers_finished(self) -> bool:
        """Whether no update or signal handler is running. Wait for this before the workflow returns."""
        return self._handlers.are_finished

    # -- recorded values

    @overload
    def run(
        self,
        name: str,
        function: Callable[[], Awaitable[T]],
        *,
        type: Any = None,
        retries: int = 0,
        timeout: float | timedelta | None = None,
    ) -> asyncio.Future[T]: ...
    @overload
    def run(
        self,
        name: str,
        function: Callable[[], T],
        *,
        type: Any = None,
        retries: int = 0,
        timeout: float | timedelta | None = None,
    ) -> asyncio.Future[T]: ...

    def run(
        self,
        name: str,
        function: Callable[[], Any],
        *,
        type: Any = None,
        retries: int = 0,
        timeout: float | timedelta | None = None,
    ) -> asyncio.Future[Any]:
        """Run a short side effect immediately and record its result. Replays return the recorded result.

        If the function raises, or takes longer than `timeout`, it is retried up to `retries` times, after pauses of 0.1
        to 2 seconds. The last error is recorded. A plain function that timed out keeps running in its thread. The
        function may run again if the worker dies before the result is stored. For long work, use a task.
        """
        commander = self._commander
        check_text("The name of ctx.run", name)
        ordinal, _ = commander.next("operation")
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        record = commander.ledger.operation(ordinal, name) or self._perform(ordinal, name, function, retries, seconds)
        future = commander.loop.create_future()
        if record.error is not None:
            message = f"Operation {name!r} failed: {record.error.kind}: {record.error.message}"
            future.set_exception(OperationFailed(message, kind=record.error.kind, data=record.error.attributes))
        else:
            kind = return_type(function) if type is None else type
            future.set_result(decode_value(record.result or b"\xc0", kind))
        return HeldFuture(commander, ordinal, future) if ordinal in commander.ledger.held else future

    def _perform(
        self, ordinal: int, name: str, function: Callable[[], Any], retries: int, timeout: float | None
    ) -> commands.RecordOperation:
        commander = self._commander
        for number in range(retries + 1):
            try:
                with outside():
                    if number:
                        threading.Event().wait(min(_MIN_PAUSE * 2 ** (number - 1), _MAX_PAUSE))
                    value = call(function, timeout)
                data = encode_value(value, f"The result of operation {name!r}", commander.largest)
                command = commands.RecordOperation(ordinal, name, data)
                break
            except Exception as error:  # noqa: BLE001  # every error is recorded
                command = commands.RecordOperation(ordinal, name, error=describe(error))
        commander.issue(command)
        return command

    def now(self) -> datetime:
        """Return the time of the current event of the history."""
        return datetime.fromtimestamp(self._commander.now, UTC)

    def uuid(self) -> UUID:
        """Return a new UUID, which is the same on every replay."""
        self._commander.check_unseen("ctx.uuid()")
        self._uuids += 1
        return UUID(bytes=derived_id(self._commander.origin, "uuid", self._uuids))

    def patched(self, name: str) -> bool:
        """Return whether to take the new branch of a change: False in runs that passed this point before the change."""
        if name not in self._patches:
            commander = self._commander
            commander.check_unseen("deciding on a patch that the code has not reached")
            check_text("The name of ctx.patched", name)
            recorded = commander.ledger.is_patched(name)
            self._patches[name] = recorded or not commander.replaying
            if self._patches[name]:
                commander.issue_once(commands.RecordPatch(name), name)
        return self._patches[name]

    # -- visible state

    def get(self, key: str, default: Any = None, *, type: Any = Any) -> Any:
        """Return a value of the run's state."""
        return decode_value(self._state[key], type) if key in self._state else default

    def set(self, key: str, value: Any) -> None:
        """Set a value of the run's state."""
        data = encode_value(value, f"State {key!r}", self._commander.limit)
        ordinal, _ = self._commander.next("state")
        self._commander.issue(commands.SetState(ordinal, check_name("state", key), data))
        self._state[key] = data

    def clear(self, key: str) -> None:
        """Remove a key from the run's state."""
        ordinal, _ = self._commander.next("state")
        self._commander.issue(commands.ClearState(ordinal, check_name("state", key)))
        self._state.pop(key, None)

    def set_attributes(self, **attributes: str | int | float | bool | datetime | None) -> None:
        """Set attributes of the run, by which lists can be filtered. None removes one. Attributes are not encrypted."""
        values = checked({name: value for name, value in (self.attributes | attributes).items() if value is not None})
        for name in attributes:
            ordinal, _ = self._commander.next("state")
            if name in values:
                data = encode_value(values[name], f"Attribute {name!r}", self._commander.limit)
                self._commander.issue(commands.SetState(ordinal, name, data, as_json(values[name])))
            else:
                self._commander.issue(commands.ClearState(ordinal, name, True))
        self._attributes = values

    @property
    def attributes(self) -> dict[str, Scalar]:
        """The attributes of the run, set by its start and its code. Times are strings, in UTC."""
        if self._attributes is None:
            self._attributes = stored(self._commander.started.attributes) if self._commander.started else {}
        return dict(self._attributes)

    @property
    def info(self) -> RunInfo:
        """Information about this run."""
        commander, started = self._commander, self._commander.started
        assert started is not None
        return RunInfo(
            run_id=UUID(bytes=commander.run_id),
            workflow=started.workflow,
            version=started.version,
            queue=started.queue,
            started_at=datetime.fromtimestamp(commander.began_at, UTC),
            parent_id=UUID(bytes=started.parent) if started.parent else None,
            continued_from=UUID(bytes=started.continued_from) if started.continued_from else None,
            history_length=commander.number,
            continue_suggested=commander.number >= _LONG_HISTORY or commander.weight >= _LARGE_HISTORY,
        )

    @property
    def should_continue_as_new(self) -> bool:
        """Whether the history is long, large, or older than 30 days: see `continue_as_new`."""
        return self.info.continue_suggested or self._commander.now - self._commander.began_at >= _OLD_HISTORY

    # -- the end of the run

    def continue_as_new(self, /, *args: Any, **kwargs: Any) -> NoReturn:
        """End this run and continue in a new one with these arguments and an empty history."""
        self._commander.check_writable()
        raise ContinueAsNew(self._workflow._encode_call(args, kwargs))

    def compensate(self, undo: Any, *args: Any, **kwargs: Any) -> None:
        """Add an undo step: a task, child workflow or function, run in reverse order on failure or cancellation.

        The arguments of a task or child workflow are checked and copied now.
        """
        self._commander.check_unseen("ctx.compensate()")
        name = str(getattr(undo, "name", None) or getattr(undo, "__name__", undo))
        if isinstance(undo, Task | CodeWorkflow):
            undo._signature.check(args, kwargs)
            what = "task" if isinstance(undo, Task) else "workflow"
            encode_call(name, args, kwargs, undo._client.settings.largest_value, what)
            args, kwargs = deepcopy((args, kwargs))
        self._compensations.add(name, partial(getattr(undo, "schedule", undo), *args, **kwargs))


class _Logger(logging.LoggerAdapter[logging.Logger]):
    """Silent during replay; adds the run to each record."""

    def __init__(self, commander: Commander) -> None:
        super().__init__(logging.getLogger(f"orchestrator.workflow.{commander.workflow}"), {})
        self._commander = commander

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802
        return not self._commander.replaying and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        run = str(UUID(bytes=self._commander.run_id))
        kwargs["extra"] = {**(kwargs.get("extra") or {}), "run_id": run, "workflow": self._commander.workflow}
        return msg, kwargs


def _decorated(function: Callable[..., Any] | str | None, add: Callable[[str, Callable[..., Any]], None]) -> Any:

    def decorate(handler: Callable[..., Any]) -> Callable[..., Any]:
        add(function if isinstance(function, str) else handler.__name__, handler)
        return handler

    return decorate(function) if callable(function) else decorate
