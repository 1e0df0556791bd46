"""The context of a workflow's code: all it may ask for beside plain asyncio."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar, overload
from uuid import UUID

from orchestrator.domain.code import commands
from orchestrator.domain.code.attributes import Scalar, as_json, checked, stored
from orchestrator.domain.ids import derived_id
from orchestrator.errors import OperationFailed
from orchestrator.sdk.checks import check_name
from orchestrator.sdk.code.commander import Commander
from orchestrator.sdk.code.endings import Compensations, ContinueAsNew
from orchestrator.sdk.code.futures import DurableFuture, SleepFuture
from orchestrator.sdk.code.handlers import Handlers
from orchestrator.sdk.code.operations import call
from orchestrator.sdk.code.scope import RunRandom, is_awaitable, outside, read_only
from orchestrator.sdk.code.signals import Signals
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.sdk.tasks.failure import describe
from orchestrator.sdk.tasks.signature import return_type
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values.conversion import schema_of
from orchestrator.sdk.values.payload import convert, decode_value, encode_value

T = TypeVar("T")
_LONG_HISTORY = 10_000
"""Events after which a run had better continue as a new one."""
_LARGE_HISTORY = 20_000_000
"""Bytes of values that it was given after which it had better, too."""
_OLD_HISTORY = 30 * 86_400.0
"""Seconds after which it had better, so that no run holds an old version of its code for ever."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
"""Seconds between two tries of a side effect, from the first to the longest."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Facts about a run."""

    run_id: UUID
    """The id that its handle has."""
    workflow: str
    """The name of the workflow."""
    version: int
    """The version with which it was started."""
    queue: str
    """Where its code runs."""
    started_at: datetime
    """When it was started. Its code begins later if it was queued."""
    parent_id: UUID | None
    """The run that started this one as its child."""
    continued_from: UUID | None
    """The run that this one goes on from."""
    history_length: int
    """Events so far."""
    continue_suggested: bool
    """The history is long, or holds much data: `continue_as_new` would make each replay short again."""


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
        """A random number generator, seeded by the run: the same numbers on every replay."""
        self.logger = _Logger(commander)
        """Logs like any logger, and is silent on replay."""

    # -- waiting for others

    @overload
    def schedule(
        self, target: Task[..., T] | CodeWorkflow[..., T], /, *args: Any, **kwargs: Any
    ) -> asyncio.Future[T]: ...
    @overload
    def schedule(self, target: str, /, *args: Any, **kwargs: Any) -> asyncio.Future[Any]: ...

    def schedule(self, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Schedule a task or a child workflow, itself or by its name; the future is there at once."""
        if isinstance(target, str):
            return self._workflow._registry.find(target).schedule(*args, **kwargs)
        return target.schedule(*args, **kwargs)

    def sleep(self, seconds: float | timedelta = 0.0, *, name: str = "", **parts: float) -> asyncio.Future[None]:
        """Start a timer: `await ctx.sleep(30)`, a timedelta, or any of its parts: `ctx.sleep(hours=24)`."""
        given = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        return SleepFuture(self._commander, given + timedelta(**parts).total_seconds(), name)

    @overload
    def promise(self, name: str, *, type: type[T], timeout: float | timedelta | None = None) -> asyncio.Future[T]: ...
    @overload
    def promise(self, name: str, *, timeout: float | timedelta | None = None) -> asyncio.Future[Any]: ...

    def promise(self, name: str, *, type: Any = Any, timeout: float | timedelta | None = None) -> asyncio.Future[Any]:
        """Wait until a promise is resolved or rejected; after `timeout`, raise TimeoutError."""
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
        """Return the signals of a name, first come, first served; those that came before are waiting."""
        self._handlers.known.setdefault(("signal", name), ["value"])
        return Signals(self._commander.mailbox(check_name("signal", name)), type)

    async def wait_condition(
        self, predicate: Callable[[], object], *, timeout: float | timedelta | None = None
    ) -> None:
        """Wait until `predicate()` is true; after `timeout`, raise TimeoutError.

        It is asked whenever the code has seen something new and has nothing left to do. It looks, and changes nothing.
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

    # -- answering others

    def query(self, function: Callable[..., Any] | str | None = None) -> Any:
        """Let a function answer queries: `@ctx.query`, or `@ctx.query("name")`. It may look, but command nothing."""
        return _decorated(function, self._handlers.add_query)

    def update(
        self, function: Callable[..., Any] | str | None = None, *, validate: Callable[..., Any] | None = None
    ) -> Any:
        """Let a function answer updates; `validate` gets the same arguments first and refuses by raising."""
        return _decorated(function, lambda name, given: self._handlers.add_update(name, given, validate))

    def signal(self, function: Callable[..., Any] | str | None = None) -> Any:
        """Let a function take the signals of its name, one value each, also those that came before.

        If it raises, the run fails.
        """
        return _decorated(function, self._handlers.add_signal)

    @property
    def all_handlers_finished(self) -> bool:
        """Say whether no handler of an update or a signal is running: wait for it before the code returns."""
        return self._handlers.are_finished

    # -- what replay gives again

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
        """Run a short side effect here and now, and record what it gives; on replay, the record counts.

        If it raises, or takes longer than `timeout`, it is tried again up to `retries` times, after waits from 0.1 to 2
        seconds; the last error is recorded. A plain function that timed out is left alone in its thread. It may run
        again if the worker dies before the record is kept. What takes long is better made a task.
        """
        commander = self._commander
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
        return future

    def _perform(
        self, ordinal: int, name: str, function: Callable[[], Any], retries: int, timeout: float | None
    ) -> commands.RecordOperation:
        commander = self._commander
        for number in range(retries + 1):
            try:
                with outside():
                    if number:
                        threading.Event().wait(min(_FIRST_PAUSE * 2 ** (number - 1), _LONGEST_PAUSE))
                    value = call(function, timeout)
                data = encode_value(value, f"The result of operation {name!r}", commander.largest)
                command = commands.RecordOperation(ordinal, name, data)
                break
            except Exception as error:  # noqa: BLE001  # whatever it raises is recorded
                command = commands.RecordOperation(ordinal, name, error=describe(error))
        commander.issue(command)
        return command

    def now(self) -> datetime:
        """Return the time of the event that the workflow is working on."""
        return datetime.fromtimestamp(self._commander.now, UTC)

    def uuid(self) -> UUID:
        """Return a new UUID, the same on every replay."""
        self._commander.check_unseen("ctx.uuid()")
        self._uuids += 1
        return UUID(bytes=derived_id(self._commander.origin, "uuid", self._uuids))

    def patched(self, name: str) -> bool:
        """Say whether to take the new branch of a change: False for what ran before the change, True from then on."""
        if name not in self._patches:
            commander = self._commander
            commander.check_unseen("deciding on a patch that the code has not come to")
            recorded = commander.ledger.is_patched(name)
            self._patches[name] = recorded or not commander.replaying
            if self._patches[name]:
                commander.issue_once(commands.RecordPatch(name), name)
        return self._patches[name]

    # -- what people can see

    def get(self, key: str, default: Any = None, *, type: Any = Any) -> Any:
        """Return the value under a key of the run's state."""
        return decode_value(self._state[key], type) if key in self._state else default

    def set(self, key: str, value: Any) -> None:
        """Put a value under a key of the run's state."""
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
        """Set attributes of the run, by which lists are filtered; None removes one. They are not encrypted."""
        found = checked({name: value for name, value in (self.attributes | attributes).items() if value is not None})
        for name in attributes:
            ordinal, _ = self._commander.next("state")
            if name in found:
                data = encode_value(found[name], f"Attribute {name!r}", self._commander.limit)
                self._commander.issue(commands.SetState(ordinal, name, data, as_json(found[name])))
            else:
                self._commander.issue(commands.ClearState(ordinal, name, True))
        self._attributes = found

    @property
    def attributes(self) -> dict[str, Scalar]:
        """The attributes of the run, as its start and its code have set them; a time is a text, in UTC."""
        if self._attributes is None:
            self._attributes = stored(self._commander.started.attributes) if self._commander.started else {}
        return dict(self._attributes)

    @property
    def info(self) -> RunInfo:
        """Facts about this run."""
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
        """Say whether the history is long, holds much data, or is older than 30 days: see `continue_as_new`."""
        return self.info.continue_suggested or self._commander.now - self._commander.began_at >= _OLD_HISTORY

    # -- how it ends

    def continue_as_new(self, /, *args: Any, **kwargs: Any) -> NoReturn:
        """End this run and go on in a new one, with these arguments and an empty history."""
        self._commander.check_writable()
        raise ContinueAsNew(self._workflow._encode_call(args, kwargs))

    def compensate(self, undo: Any, *args: Any, **kwargs: Any) -> None:
        """Remember how to undo a step: a task, a child workflow or a function, run in reverse on failure or cancel."""
        self._commander.check_unseen("ctx.compensate()")
        name = str(getattr(undo, "name", None) or getattr(undo, "__name__", undo))
        self._compensations.add(name, partial(getattr(undo, "schedule", undo), *args, **kwargs))


class _Logger(logging.LoggerAdapter[logging.Logger]):
    """Says nothing on replay, and names the run otherwise."""

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
    """Add a handler, as a decorator with or without a name in brackets."""

    def decorate(given: Callable[..., Any]) -> Callable[..., Any]:
        add(function if isinstance(function, str) else given.__name__, given)
        return given

    return decorate(function) if callable(function) else decorate
