"""Celery's `Task`, run by a native task."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, ClassVar

from orchestrator.compat.celery import canvas, signals
from orchestrator.compat.celery import request as requests
from orchestrator.compat.celery.app import calls, registering
from orchestrator.compat.celery.app.current import app_or_default
from orchestrator.compat.celery.app.execution import run_eagerly
from orchestrator.compat.celery.app.replacing import replace
from orchestrator.compat.celery.exceptions import (
    EncodeError,
    Ignore,
    MaxRetriesExceededError,
    NotCovered,
    Refused,
    Reject,
    Retry,
)
from orchestrator.compat.celery.request import Context, update_state
from orchestrator.compat.celery.results.single import of_handle
from orchestrator.compat.celery.tags import tagged_call
from orchestrator.errors import PayloadError
from orchestrator.sdk.tasks.context import current_runtime
from orchestrator.sdk.tasks.task import Task as NativeTask


class Task:
    """A task. Subclass it for `base=`, or to define `run` in a class."""

    Request: ClassVar[Any] = None
    name: Any = None
    app: Any
    typing: bool = True
    max_retries: int | None = 3
    default_retry_delay: float = 3 * 60
    rate_limit: str | float | None = None
    ignore_result: bool | None = None
    trail: bool = True
    send_events: bool = True
    store_errors_even_if_ignored: bool | None = None
    serializer: str | None = None
    time_limit: float | None = None
    soft_time_limit: float | None = None
    track_started: bool | None = None
    acks_late: bool | None = None
    acks_on_failure_or_timeout: bool | None = None
    reject_on_worker_lost: bool | None = None
    throws: tuple[type[BaseException], ...] = ()
    expires: float | datetime | None = None
    priority: int | None = None
    queue: str | None = None
    routing_key: str | None = None
    exchange: str | None = None
    resultrepr_maxsize: int = 1024
    autoretry_for: tuple[type[BaseException], ...] = ()
    dont_autoretry_for: tuple[type[BaseException], ...] = ()
    retry_kwargs: Mapping[str, Any] = {}
    retry_backoff: bool | float = False
    retry_backoff_max: float = 600
    retry_jitter: bool = True
    pydantic: bool = False
    abstract: bool = True
    bind: bool = False

    MaxRetriesExceededError = MaxRetriesExceededError
    _native: NativeTask[..., Any] | None = None

    # -- running

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Do the task's work; subclasses override it."""
        raise NotImplementedError("Tasks must define the run method.")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = requests.current.get()
        if running is not None and running[0] is self and not running[1].called_directly:
            return self.run(*args, **kwargs)  # called by a subclass with its own `__call__`
        token = requests.current.set((self, Context(args=args, kwargs=kwargs, task=self.name)))
        try:
            return self.run(*args, **kwargs)
        finally:
            requests.current.reset(token)

    @property
    def request(self) -> Context:
        """The call that this task is running."""
        running = requests.current.get()
        return running[1] if running is not None and running[0] is self else _NOT_RUNNING

    def push_request(self, *args: Any, **kwargs: Any) -> None:
        """Set the task's request; for tests."""
        requests.current.set((self, Context(*args, **kwargs)))

    def pop_request(self) -> None:
        """Undo `push_request`."""
        requests.current.set(None)

    # -- hooks

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Called before each attempt."""

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """Called after success."""

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Called before a retry."""

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Called after failure."""

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Called after each end."""

    @classmethod
    def _get_app(cls) -> Any:
        """Return the application; libraries for Celery use this."""
        return cls.app

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Called when the class is bound to an application."""

    # -- calling

    def delay(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_plain and requests.MESSAGE not in kwargs:
            native = self._native or self._registered()
            if self._check is not None:
                self._check(args, kwargs)
            positional, keywords = (args, kwargs) if self.pydantic else tagged_call(args, kwargs)
            try:
                return self._result(native.enqueue(*positional, **keywords))
            except PayloadError as error:
                raise EncodeError(str(error)) from error
        return self.apply_async(args, kwargs)

    def delay_on_commit(self, *args: Any, **kwargs: Any) -> None:
        """Enqueue the task after Django's open transaction has committed."""
        self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(self, *args: Any, **kwargs: Any) -> None:
        transaction = importlib.import_module("django.db.transaction")
        transaction.on_commit(functools.partial(self.apply_async, *args, **kwargs))

    @property
    def is_plain(self) -> bool:
        """Return whether a call needs no processing: no signals, routing function, eager mode or enclosing task."""
        return (
            self.app._is_plain
            and not signals.before_task_publish.receivers
            and not signals.after_task_publish.receivers
            and not self.has_own_apply_async
            and current_runtime() is None
        )

    @property
    def has_own_apply_async(self) -> bool:
        """Whether a subclass overrides `apply_async`, which is not called for parts of compositions."""
        return type(self).apply_async is not Task.apply_async

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        **options: Any,
    ) -> Any:
        """Enqueue the task, with options: countdown, eta, expires, queue, priority, link, …"""
        if isinstance(args, str):
            raise TypeError("task args must be a list or tuple")
        if self._check is not None:
            self._check(args or (), kwargs or {})
        if self.app.conf.task_always_eager:
            return self.apply(args, kwargs, task_id=task_id, link=link, link_error=link_error, **options)
        return calls.publish(self, args or (), kwargs or {}, task_id, link, link_error, options)

    def apply(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        link: Any = None,
        link_error: Any = None,
        task_id: str | None = None,
        retries: int = 0,
        throw: bool | None = None,
        **options: Any,
    ) -> Any:
        """Run the task in this process with request, hooks, retries and callbacks; return its EagerResult."""
        return run_eagerly(self, args or (), kwargs or {}, link, link_error, task_id, retries, throw, options)

    def retry(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        exc: BaseException | None = None,
        throw: bool = True,
        eta: datetime | None = None,
        countdown: float | None = None,
        max_retries: int | None = None,
        **options: Any,
    ) -> Retry:
        """Retry the task later: `raise self.retry(exc=error, countdown=30)`."""
        request = self.request
        limit = self.max_retries if max_retries is None else max_retries
        if request.called_directly:
            raise exc or Retry("Task can be retried", None)
        if unknown := options.keys() - calls.WITHOUT_EFFECT:
            raise NotCovered(f"self.retry({', '.join(sorted(unknown))}=…)", "A retry keeps the options of its call.")
        if eta is None and countdown is None:
            countdown = self.default_retry_delay
        retries = request.retries + 1
        if limit is not None and retries > limit:
            if exc is not None:
                raise exc
            raise self.MaxRetriesExceededError(
                f"Can't retry {self.name}[{request.id}] args:{request.args} kwargs:{request.kwargs}",
                task_args=request.args,
                task_kwargs=request.kwargs,
            )
        retry_ = Retry(exc=exc, when=eta or countdown, is_eager=request.is_eager)
        retry_.sig = (args, kwargs)
        if throw:
            raise retry_ from exc
        return retry_

    def replace(self, sig: Any) -> Any:
        """Let another task or composition provide this task's result."""
        replace(self, sig)
        raise Ignore("Replaced by new task")

    add_to_chord = Refused("self.replace(group(…)) adds tasks where this one stands.")

    def update_state(self, task_id: str | None = None, state: str | None = None, meta: Any = None, **_: Any) -> None:
        """Set the state and meta that `AsyncResult.state` and `.info` show while the task runs."""
        update_state(self.request, task_id, state, meta)

    send_event = Refused("Log a line: what a task logs is kept with it.")

    # -- signatures

    def signature(self, args: Any = None, *starargs: Any, **starkwargs: Any) -> Any:
        starkwargs.setdefault("app", self.app)
        return canvas.signature(self, args, *starargs, **starkwargs)

    subtask = signature

    def s(self, *args: Any, **kwargs: Any) -> Any:
        """Return a signature whose first argument will be the result of the task before it."""
        return self.signature(args, kwargs)

    def si(self, *args: Any, **kwargs: Any) -> Any:
        """Return a signature that ignores the result of the task before it."""
        return self.signature(args, kwargs, immutable=True)

    def chunks(self, it: Any, n: int) -> Any:
        """Return a group of calls with `n` items each; each call runs its items in one task."""
        return canvas.chunks(self.s(), it, n, app=self.app)

    def map(self, it: Any) -> Any:
        """Return a call that runs this task for each item, in one task."""
        return canvas.xmap(self.s(), it, app=self.app)

    def starmap(self, it: Any) -> Any:
        """Return a call that runs this task for each tuple of arguments, in one task."""
        return canvas.xstarmap(self.s(), it, app=self.app)

    def AsyncResult(self, task_id: str, **kwargs: Any) -> Any:  # noqa: N802  # Celery's name
        """Return the result of a call by its id."""
        return self.app.AsyncResult(task_id, task_name=self.name, **kwargs)

    # -- what it is

    @property
    def backend(self) -> Any:
        """The result backend, which does not exist: raises NotCovered."""
        return self.app.backend

    signature_from_request = subtask_from_request = Refused("self.retry(args=…, kwargs=…) runs it again.")

    @cached_property
    def _function_signature(self) -> inspect.Signature:
        return inspect.signature(self.run)

    @cached_property
    def _check(self) -> Callable[[Sequence[Any], Mapping[str, Any]], None] | None:
        """Raises TypeError for arguments that `run` does not accept; None if it accepts everything."""
        if not self.typing:
            return None
        return registering.checking(self.name, self._function_signature)

    def _registered(self) -> NativeTask[..., Any]:
        if self._native is None:
            self.app._configure()
            self._native = registering.register(self)
        return self._native

    @cached_property
    def _result(self) -> Callable[..., Any]:
        app = self.app
        return lambda handle: of_handle(app, handle)

    def __reduce__(self) -> Any:
        return _by_name, (self.name,)

    def __repr__(self) -> str:
        return f"<@task: {self.name} of {self.app!r}>"

    @property
    def __name__(self) -> str:
        return str(type(self).__name__)


def _by_name(name: str) -> Any:
    return app_or_default().tasks[name]


_NOT_RUNNING = Context()
__all__ = ["Context", "Ignore", "Reject", "Retry", "Task"]
