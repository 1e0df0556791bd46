"""Tasks: functions that workers can run."""

from __future__ import annotations

import functools
import inspect
from asyncio import Future
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack

import msgspec

from orchestrator.domain import redaction
from orchestrator.domain.code.commands import CancelTask, ScheduleTask
from orchestrator.domain.tasks.headers import check_headers, with_headers
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import InvalidTask, NotDeterministic, OrchestratorError
from orchestrator.sdk.checks import for_message
from orchestrator.sdk.client import Client, Deployment, client_of
from orchestrator.sdk.code.commander import current
from orchestrator.sdk.code.futures import DurableFuture
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.inside import inside_workflow
from orchestrator.sdk.middleware import EnqueueCall, headers_here
from orchestrator.sdk.tasks.compositions import Parts
from orchestrator.sdk.tasks.empty_functions import is_empty
from orchestrator.sdk.tasks.followers import callbacks_of, check_followers, followers_of
from orchestrator.sdk.tasks.handle import Handle
from orchestrator.sdk.tasks.option_types import OptionTypes
from orchestrator.sdk.tasks.options import CELERY_HINTS, CallOptions, Placed, check_unique, with_options
from orchestrator.sdk.tasks.retry import Retry
from orchestrator.sdk.tasks.signature import Signature
from orchestrator.sdk.values.payload import digest_call, encode_call
from orchestrator.sdk.values.sealing import outgoing_task, scheduled_task, sealed_task
from orchestrator.trace_context import current_trace
from orchestrator.tracing.entry import sending

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

    from orchestrator.store.other_drivers import HasCursor

P = ParamSpec("P")
R = TypeVar("R")
_SCHEDULED_RETRIES = 3
"""The default retries of a task that a workflow as code schedules. An enqueued task has none by default."""


class Task(Parts[P, R]):
    """A registered function. A plain call runs it in this process; `enqueue` makes a worker run it."""

    def __init__(
        self,
        client: Client,
        name: str,
        function: Callable[P, Any],
        options: CallOptions,
        signature: Signature,
        chosen: frozenset[str] = frozenset(),
    ) -> None:
        functools.update_wrapper(self, function)
        self._client = client
        self.name = name
        """The name of the task: `module.function`, or the `name=` of its decorator."""
        self.function = function
        """The function of the task, which a plain call runs."""
        self._call_options: CallOptions = options
        self._chosen = chosen
        """The names of the options that the user set. Defaults of the others may depend on where the task runs."""
        self._signature = signature
        self._is_variant = False
        """Whether the task was made by `options`. Only the original is registered."""
        self._is_via = False
        self._is_async = inspect.iscoroutinefunction(function)
        self._headers: Mapping[str, str] | None = None
        """In a copy for one call, the headers after middleware."""
        self._is_hooked = False
        """Whether this is a copy for which middleware was already called."""
        self._hook_stack: ExitStack | None = None
        """In a copy for many calls, the parts of hooks that run after all tasks are stored."""
        self._placed: Placed | None = None
        self._scheduled: dict[str, Task[P, R]] = {}
        self._after_success = followers_of(self, "on_success", options.on_success)
        self._after_failure = followers_of(self, "on_failure", options.on_failure)
        if self._after_success and not options.store_result:
            check_followers(self)

    _interruptions: Mapping[type[BaseException], type[BaseException]] | None = None
    """What is raised in the code in place of TaskTimeout and SoftTimeout: an attribute of the function, if given."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function in this process. Inside the code of a workflow, raise NotDeterministic."""
        self._refuse_in_workflow("called like a function")
        if self._is_signature_only:
            raise InvalidTask(
                f"Task {self.name!r} has an executor and no body, so a plain call has nothing to run. Enqueue "
                "it, or give the function a body, which plain calls run and workers do not."
            )
        arguments, keywords = self._signature.with_context(self.name, args, kwargs)
        result: R = self.function(*arguments, **keywords)
        return result

    def __repr__(self) -> str:
        return f"<Task {self.name}{self._client.via}>"

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            """Suggest a replacement for a method of Celery's tasks."""
            if name not in CELERY_HINTS:
                return object.__getattribute__(self, name)  # raises the usual AttributeError
            instead = CELERY_HINTS[name].format(task=self.__dict__.get("__name__", "task"))
            raise AttributeError(f"Task {self.name!r} has no {name}, which is Celery's. {instead}")

    def options(self, **options: Unpack[OptionTypes]) -> Task[P, R]:
        """Return this task with other options: `resize.options(delay=60).enqueue(…)`."""
        changed = with_options(self._call_options, options)
        if "retries" in options and isinstance(changed.retries, Retry) and callable(changed.retries.backoff):
            raise InvalidTask(
                f"Option retries: a backoff function belongs on the decorator of task {self.name!r}, because the "
                f"worker has no other; found {changed.retries.backoff!r}."
            )
        variant = self._variant(self._client, changed, self._chosen | options.keys())
        if changed.is_computed:
            self._signature.check_key_functions(options)
        return variant

    def via(self, cell: Deployment) -> Task[P, R]:
        """Return this task for another deployment: `resize.via(europe).enqueue(…)`; see `app.at`."""
        variant = self._variant(client_of(cell), self._call_options, self._chosen)
        variant._is_via = True
        return variant

    def _variant(self, client: Client, options: CallOptions, chosen: frozenset[str]) -> Task[P, R]:
        variant: Task[P, R] = Task(client, self.name, self.function, options, self._signature, chosen)
        variant._is_variant, variant._is_via = True, self._is_via
        return variant

    def schedule(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Schedule the task inside a workflow as code, and return a future. It is sent when the code next waits.

        By default, the task runs in the workflow's queue with up to four attempts; its options override this. Do not
        confuse this with `@app.schedule`, which starts tasks by the clock.
        """
        commander = current()
        if commander is None or commander.started is None:
            raise OrchestratorError(f"{self.name}.schedule(…) works inside a workflow only. Use enqueue(…) here.")
        if self._call_options.on_success is True:
            raise InvalidTask(
                "Option on_success=True is allowed only inside a task that runs in a worker; this is a workflow."
            )
        self._client.refuse_cell(f"Task {self.name!r}")
        ordinal, identifier = commander.next("task")
        scheduled = self._as_scheduled(commander.started.queue)
        described = scheduled._described(identifier, args, kwargs, commander.run_id, ordinal)
        described = scheduled_task(described, self._client.settings)
        commander.issue(ScheduleTask(ordinal, described, digest_call(args, kwargs)))
        restore = self._signature.convert_stored
        return DurableFuture(commander, identifier, f"Task {self.name!r}", restore, CancelTask(identifier))

    def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Enqueue the task, so that a worker runs it: `resize.enqueue("a.png", width=50).result()`.

        The task is durable when this returns. The arguments are those of the function. They are checked before
        anything is written.
        """
        self._refuse_in_workflow("enqueued")
        if self._client.middleware is not None and not self._is_hooked:
            with self._client.middleware.enqueuing(call := self._as_call(args, kwargs)):
                return _stored(call, self._hooked(call).enqueue(*args, **kwargs))
        with sending("enqueue", self.name, self.queue) as sent:
            task = outgoing_task(self._new(args, kwargs, trace=current_trace()), self._client.settings)
            submit = self._enqueue_path()
            sent.created(task.id)
            if submit is None:
                return Handle(self._client, self._client.backend.tasks.enqueue(task), self._signature)
            return Handle(self._client, submit([task]).get(task.id, task.id), self._signature)

    async def aenqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Do the same as `enqueue` without blocking the event loop.

        Coroutines that enqueue at the same time share a commit; each continues when its own task is durable. A
        coroutine that is cancelled meanwhile may have stored its task.
        """
        if inside_workflow() or self._client.runtime() is not None:
            return await self._client.threads.run(self.enqueue, *args, **kwargs)
        if self._client.middleware is not None and not self._is_hooked:
            async with self._client.middleware.aenqueuing(call := self._as_call(args, kwargs)):
                return _stored(call, await self._hooked(call).aenqueue(*args, **kwargs))
        with sending("enqueue", self.name, self.queue) as sent:
            task = self._new(args, kwargs, trace=current_trace())
            self._enqueue_path()  # refuses on_success=True outside of a task
            if len(task.payload) > (settings := self._client.settings).inline_payload and settings.payload_store:
                task = await self._client.threads.run(outgoing_task, task, settings)
            else:
                task = sealed_task(task, settings)
            sent.created(task.id)
            backend = await self._client.opened()
            return Handle(self._client, await backend.tasks.aenqueue(task), self._signature)

    delay = enqueue
    """Celery's name for `enqueue`. Use the option `delay` to run later: `task.options(delay=60).enqueue(…)`."""
    adelay = aenqueue

    def enqueue_in(
        self: Task[P, R],
        connection: Connection | Session | scoped_session[Any] | HasCursor,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Handle[R]:
        """Enqueue the task inside a transaction of the caller. The task exists only if the transaction commits.

        `connection` is a connection or session of SQLAlchemy, or a connection of psycopg2, psycopg 3 or Django, to the
        database of the application or of the cell in `via`. In autocommit mode, the task exists at once.
        """
        if self._call_options.on_success is True:
            raise InvalidTask("Option on_success=True cannot be combined with enqueue_in: the transaction decides.")
        self._refuse_in_workflow("enqueued")
        if self._client.middleware is not None and not self._is_hooked:
            with self._client.middleware.enqueuing(call := self._as_call(args, kwargs)):
                return _stored(call, self._hooked(call).enqueue_in(connection, *args, **kwargs))
        with sending("enqueue", self.name, self.queue) as sent:
            task = outgoing_task(self._new(args, kwargs, trace=current_trace()), self._client.settings)
            sent.created(task.id)
            return Handle(self._client, self._client.backend.tasks.enqueue_in(connection, task), self._signature)

    async def aenqueue_in(
        self: Task[P, R],
        connection: AsyncConnection | AsyncSession | async_scoped_session[Any] | HasCursor,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Handle[R]:
        """Do the same as `enqueue_in` with an asynchronous connection of SQLAlchemy, psycopg 3 or asyncpg."""
        from orchestrator.store.other_drivers import run_sync_of  # loads SQLAlchemy, which workers do without

        run_sync = run_sync_of(connection)
        if run_sync is None:
            raise InvalidTask(
                f"aenqueue_in: expected an AsyncSession or AsyncConnection of SQLAlchemy, or an asynchronous "
                f"connection of psycopg or asyncpg, found {for_message(connection)}. With one that is not "
                f"asynchronous, call `task.enqueue_in(session, …)`."
            )
        handle: Handle[R] = await run_sync(self.enqueue_in, *args, **kwargs)
        return handle

    def _refuse_in_workflow(self, how: str) -> None:
        """Refuse to run or enqueue the task from the code of a workflow, and suggest `schedule`."""
        if inside_workflow():
            raise NotDeterministic(
                f"Task {self.name!r} was {how} inside a workflow, and every replay would repeat that. Use "
                f"`await {getattr(self, '__name__', self.name)}.schedule(…)`."
            )

    def _enqueue_path(self) -> Callable[[Sequence[NewTask]], Mapping[bytes, bytes]] | None:
        """Return the function with which the running task submits new tasks; None outside of a task."""
        runtime = self._client.runtime()
        if runtime is not None:
            return runtime.enqueue_on_success if self._call_options.on_success is True else runtime.enqueue
        if self._call_options.on_success is True:
            raise InvalidTask("Option on_success=True is allowed only inside a task that runs in a worker.")
        return None

    def _new(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        run_id: bytes | None = None,
        position: int | None = None,
        trace: str | None = None,
    ) -> NewTask:
        """Check a call and return the new task. Nothing is written."""
        self._refuse_in_workflow("enqueued")
        runtime = self._client.runtime()
        identifier = new_id() if runtime is None else runtime.next_id()
        task = self._described(identifier, args, kwargs, run_id, position, in_task=runtime is not None)
        if trace is not None:
            task = msgspec.structs.replace(task, trace=trace)
        self._signature.check_types(args, kwargs, task.payload)
        return task

    def _described(
        self,
        identifier: bytes,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        run_id: bytes | None,
        position: int | None,
        *,
        in_task: bool = False,
    ) -> NewTask:
        """Check a call and return the new task, with the given id."""
        self._signature.check(args, kwargs)
        options = self._call_options
        settings = self._client.settings
        placed = self._placed or self._place(args, kwargs)
        if options.executor_call is not None:
            args, kwargs = self._signature.by_name(args, kwargs)
        if placed.unique is not None:
            check_unique(self.name, placed.unique, in_run=run_id is not None, in_task=in_task)
            if placed.unique.same_call and options.executor_call is None:
                args, kwargs = self._signature.normal(args, kwargs)
        is_inline = placed.unique is not None and placed.unique.same_call
        limit = settings.max_payload if is_inline else settings.largest_value
        return NewTask(
            id=identifier,
            name=self.name,
            queue=self.queue,
            payload=encode_call(self.name, args, kwargs, limit, is_compared=is_inline),
            priority=options.priority,
            delay=options.delay_seconds,
            options=placed.options if self._headers is None else with_headers(placed.options, self._headers),
            run_id=run_id,
            position=position,
            lane=placed.lane,
            expires=options.expiry_seconds,
            unique=placed.unique,
            callbacks=self._callbacks,
        )

    def _as_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> EnqueueCall:
        options = {name: getattr(self._call_options, name) for name in self._chosen if name != "headers"}
        headers = {**headers_here(), **(self._call_options.headers or {})}
        return EnqueueCall(kind="task", name=self.name, args=args, kwargs=kwargs, options=options, headers=headers)

    def _hooked(self, call: EnqueueCall) -> Task[P, R]:
        """Return a copy of the task for one call, with the options and headers that middleware has set."""
        changed = {
            name: value for name, value in call.options.items() if value is not getattr(self._call_options, name, ...)
        }
        if (
            self._placed is None and not changed and not self._call_options.is_computed
        ):  # fill the caches before the copy
            self._place(call.args, call.kwargs)
            _ = self.queue, self._callbacks
        hooked = self.options(**changed) if changed else copy(self)
        hooked._headers, hooked._is_hooked = check_headers(call.headers), True
        return hooked

    def _for_many(self, hook_stack: ExitStack) -> Task[P, R]:
        """Return a copy of the task for many calls, which calls the hooks for each of them."""
        hooked = copy(self)
        hooked._hook_stack, hooked._is_hooked = hook_stack, True
        return hooked

    def _as_scheduled(self, queue: str) -> Task[P, R]:
        """Return this task with the default options of tasks that a workflow in this queue schedules."""
        scheduled = self._scheduled.get(queue)
        if scheduled is None:
            defaults: dict[str, Any] = {"queue": self._call_options.queue or self._client.route(self.name, queue)}
            if "retries" not in self._chosen:
                defaults["retries"] = _SCHEDULED_RETRIES
            changed = with_options(self._call_options, defaults)
            scheduled = Task(self._client, self.name, self.function, changed, self._signature, self._chosen)
            self._scheduled[queue] = scheduled
        return scheduled

    @functools.cached_property
    def _is_signature_only(self) -> bool:
        """Whether an executor runs the task and the function has an empty body, so that a plain call has no effect."""
        return self._call_options.executor_call is not None and is_empty(self.function)

    @functools.cached_property
    def queue(self) -> str:
        """The queue of the task: its own, or the queue from the application's routes."""
        return self._call_options.queue or self._client.route(self.name)

    @property
    def _own_queue(self) -> str | None:
        """The queue of the task; None if neither its options nor the routes name one."""
        return self._call_options.queue or self._client.route(self.name, "") or None

    @functools.cached_property
    def _callbacks(self) -> str | None:
        return callbacks_of(self, ())

    @functools.cached_property
    def _redacting_options(self) -> CallOptions:
        """The options with all `redact` patterns, including those in the settings, which are read only on a call."""
        everywhere = redaction.split_patterns(self._client.settings.redact)
        return self._call_options.redacting(everywhere, self._signature.names)

    def _place(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Placed:
        """Return the lane, key and options of a call. Cache them if they do not depend on the arguments."""
        options, period = self._redacting_options, self._client.settings.idempotency_period
        if options.is_computed:
            return options.placed(self.name, self._signature.named(args, kwargs), period)
        self._placed = options.placed(self.name, {}, period)
        return self._placed


def _stored(call: EnqueueCall, handle: Handle[R]) -> Handle[R]:
    """Set the id of the stored task on the call, for middleware."""
    call.id = handle.id
    return handle
