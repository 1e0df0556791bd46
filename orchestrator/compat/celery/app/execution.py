"""One attempt of a task, with hooks, signals, retries and callbacks; in a worker, or eagerly."""

from __future__ import annotations

import inspect
import random
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from orchestrator.compat.celery import outcomes, signals, states
from orchestrator.compat.celery import request as requests
from orchestrator.compat.celery.app.calls import announce, aware_datetime
from orchestrator.compat.celery.app.replacing import awaited
from orchestrator.compat.celery.exceptions import (
    Again,
    ChordError,
    EncodeError,
    Ignore,
    Reject,
    Replaced,
    Retry,
    TaskRevokedError,
    TimeLimitExceeded,
)
from orchestrator.compat.celery.request import ARGS, MARK, MESSAGE, Attempt, Context, hostname
from orchestrator.compat.celery.results.single import EagerResult
from orchestrator.compat.celery.tags import tagged
from orchestrator.compat.celery.utils import listed, uuid
from orchestrator.errors import OrchestratorError, PayloadError, TaskAborted
from orchestrator.sdk.middleware import AttemptEnd, Middleware
from orchestrator.sdk.tasks.context import TaskContext, TaskRuntime, current_runtime
from orchestrator.sdk.values.payload import encode_value


class ExceptionInfo:
    """An exception with its traceback, for hooks and signals."""

    def __init__(self, error: BaseException) -> None:
        self.type = type(error)
        self.exception = error
        self.tb = error.__traceback__
        self.exc_info = (self.type, error, self.tb)
        self.traceback = "".join(traceback.format_exception(error))

    def __str__(self) -> str:
        return self.traceback


def run_in_worker(task: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    runtime = current_runtime()
    if runtime is None:  # a direct call of the native task
        kwargs.pop(MESSAGE, None)
        return task(*args, **kwargs)
    request = Attempt(task, runtime, args, kwargs)
    if request.failed:
        task_id, _, *rest = request.args or ()
        request.args = [Context(task_id), outcomes.named(request.failed["kind"], request.failed["args"]), *rest]
    if _watched is not None:
        _watched[runtime.dispatch.id] = (task, request)
    token = requests.current.set((task, request))
    try:
        if "replaced" in request._details:
            return tagged(awaited(task, runtime.context()))
        if request.retries and request.expires and aware_datetime(request.expires) <= datetime.now(UTC):
            signals.task_revoked.send(task, request=request, terminated=False, signum=None, expired=True)
            raise TaskRevokedError("expired")  # the leader looks at `expires` before the first attempt only
        state, value = attempt(task, request)
        if state == states.SUCCESS:
            return tagged(value) if _stores_result(runtime) else None
        return _end_without_success(task, request, state, value)
    finally:
        requests.current.reset(token)
        if _watched is not None:
            _watched.pop(runtime.dispatch.id, None)


def _stores_result(runtime: TaskRuntime) -> bool:
    options = runtime.dispatch.options
    return options is None or '"store_result":false' not in options


def _check_result(task: Any, value: Any) -> None:
    """Raise for a result that cannot be stored, before hooks and callbacks are called for a success."""
    runtime = current_runtime()
    if runtime is not None and _stores_result(runtime):
        label, limit = f"The result of task {task.name!r}", task.app.orchestrator.settings.largest_value
        try:
            encode_value(tagged(value), label, limit)
        except PayloadError as error:
            raise EncodeError(str(error)) from error


class _StopMiddleware(Middleware):
    """Calls hooks and signals for tasks whose code did not stop at a hard time limit or a revoke."""

    def ended(self, ctx: TaskContext, end: AttemptEnd) -> None:
        watched = (_watched or {}).pop(ctx.task_id.bytes, None)
        if watched is not None and end.outcome == "cancelled":
            _send_revoked(*watched)
        elif watched is not None and end.error is not None:
            error = outcomes.named(end.error.kind, [end.error.message])
            if isinstance(error, TimeLimitExceeded):
                timed_out(*watched, error)


_watched: dict[bytes, tuple[Any, Context]] | None = None
"""Running attempts by task id, for `_StopMiddleware`. None if no hook or signal needs them."""


def watch_stops(app: Any) -> None:
    """Register `_StopMiddleware`, if a hook or signal needs to know of hard time limits or revokes."""
    global _watched
    has_hooks = any(
        "on_failure" in vars(scope) or "after_return" in vars(scope)
        for task in app.tasks.values()
        for scope in (task, *type(task).__mro__)
        if not scope.__module__.startswith(__package__)
    )
    if _watched is None and (signals.task_failure.receivers or signals.task_revoked.receivers or has_hooks):
        _watched = {}
        app.orchestrator.middleware.add(_StopMiddleware())


def _claim_stop(request: Context) -> bool:
    """Return whether the attempt itself must report its stop, because the middleware has not done so."""
    return _watched is None or (request.native and _watched.pop(request.native.task_id.bytes, None)) is not None


def _send_revoked(task: Any, request: Context) -> None:
    signals.task_revoked.send(task, request=request, terminated=True, signum=15, expired=False)


def timed_out(task: Any, request: Context, error: TimeLimitExceeded) -> None:
    """Call the hooks and signals that Celery's worker calls at a hard time limit."""
    einfo = ExceptionInfo(error)
    _call_failure_hooks(task, request, error, einfo)
    args, kwargs = request.args or (), request.kwargs or {}
    task.after_return(states.FAILURE, error, request.id or "", args, kwargs, einfo)


def _end_without_success(task: Any, request: Context, state: str, error: BaseException) -> Any:
    """Report an end other than success: raise, or return a marked result."""
    ctx = request.native
    assert ctx is not None
    if state == states.RETRY:
        assert isinstance(error, Retry)
        details: dict[str, Any] = {"retries": request.retries + 1}
        args, kwargs = error.sig or (None, None)
        if args is not None or kwargs is not None:
            details |= {
                "args": tagged(list(request.args or ()) if args is None else list(args)),
                "kwargs": tagged(dict(request.kwargs or {}) if kwargs is None else dict(kwargs)),
            }
        ctx.heartbeat(details)
        if signals.before_task_publish.receivers:
            sent = (request.args or ()) if args is None else args, (request.kwargs or {}) if kwargs is None else kwargs
            headers = {**(request.headers or {}), "retries": request.retries + 1}
            announce(task.app, task._native, *sent, request.id, {}, {"headers": headers})
        retry_ = Again(_seconds_until(error.when), str(error))
        if error.exc is not None:
            retry_.data = {"kind": _kind(error.exc), "message": str(error.exc)}
        raise retry_ from error.exc
    if isinstance(error, Reject) and error.requeue:
        raise Again(1.0, "rejected, and put back into its queue")
    if isinstance(error, Replaced):
        if ctx.run_id is None and not request.is_bridged:
            return {MARK: dict(error.reference)}
        ctx.heartbeat({**error.reference, "looks": 0})
        raise Again(0.1, f"replaced by {error.reference['replaced']}")
    if isinstance(error, Ignore):
        state_, meta = request.state or (state, None)
        if state_ == states.FAILURE or ctx.run_id is not None:
            error.state, error.meta = state_, meta  # type: ignore[attr-defined]  # attributes of the exception are stored with it
            raise error
        return {MARK: {"state": state_, "meta": tagged(meta)}}
    if error.args and error.args != (str(error),):
        with suppress(Exception):  # the exception may not allow attributes
            setattr(error, ARGS, tagged(list(error.args)))
    raise error


def _kind(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")


def _seconds_until(when: Any) -> float:
    if isinstance(when, datetime):
        when = (aware_datetime(when) - datetime.now(UTC)).total_seconds()
    return max(0.0, float(when or 0.0))


def attempt(task: Any, request: Context) -> tuple[str, Any]:
    """Run a task once; return its state, and its result or exception. A revoke or time limit is raised."""
    args, kwargs, identifier = request.args or (), request.kwargs or {}, request.id or ""
    state: str = states.SUCCESS
    value: Any = None
    einfo: ExceptionInfo | None = None
    if signals.task_prerun.receivers:
        signals.task_prerun.send(task, task_id=identifier, task=task, args=args, kwargs=kwargs)
    try:
        try:
            task.before_start(identifier, args, kwargs)
            value = call(task, request)
            if value is not None and not request.is_eager:
                _check_result(task, value)
            if request.callbacks:
                _callbacks(task, request, value)
        except Retry as error:
            state, value, einfo = states.RETRY, error, ExceptionInfo(error)
            task.on_retry(error.exc or error, identifier, args, kwargs, einfo)
            signals.task_retry.send(task, request=request, reason=error, einfo=einfo)
        except (Ignore, Reject) as error:
            if isinstance(error, Replaced) and request.is_eager:
                return state, error.reference["value"]
            state, value = (states.IGNORED if isinstance(error, Ignore) else states.REJECTED), error
        except TaskAborted:
            state = states.REVOKED
            if _claim_stop(request):
                _send_revoked(task, request)
            raise
        except TimeLimitExceeded as error:
            state = states.FAILURE
            call_errbacks(task, request, error)
            if _claim_stop(request):
                timed_out(task, request, error)
            raise
        except Exception as error:  # noqa: BLE001  # any exception of the task is its failure
            state, value, einfo = states.FAILURE, error, ExceptionInfo(error)
            call_errbacks(task, request, error)
            _call_failure_hooks(task, request, error, einfo)
        except BaseException:
            state = states.FAILURE
            raise
        else:
            task.on_success(value, identifier, args, kwargs)
            if signals.task_success.receivers:
                signals.task_success.send(task, result=value)
        if state not in (states.IGNORED, states.REJECTED, states.RETRY):
            task.after_return(state, value, identifier, args, kwargs, einfo)
    finally:
        if signals.task_postrun.receivers:
            signals.task_postrun.send(
                task, task_id=identifier, task=task, args=args, kwargs=kwargs, retval=value, state=state
            )
    return state, value


def _call_failure_hooks(task: Any, request: Context, error: Exception, einfo: ExceptionInfo) -> None:
    args, kwargs, identifier = request.args or (), request.kwargs or {}, request.id or ""
    task.on_failure(error, identifier, args, kwargs, einfo)
    if signals.task_failure.receivers:
        signals.task_failure.send(
            task,
            task_id=identifier,
            exception=error,
            args=args,
            kwargs=kwargs,
            traceback=error.__traceback__,
            einfo=einfo,
        )


def call(task: Any, request: Context) -> Any:
    """Run the task's code; convert exceptions of `autoretry_for` to retries."""
    args, kwargs = request.args or (), request.kwargs or {}
    if not task.autoretry_for:
        return task(*args, **kwargs)
    try:
        return task(*args, **kwargs)
    except (Ignore, Reject, Retry, TaskAborted, TimeLimitExceeded):
        raise
    except Exception as error:
        if isinstance(error, task.dont_autoretry_for) or not isinstance(error, task.autoretry_for):
            raise
        options = dict(task.retry_kwargs)
        if task.retry_backoff:
            options.setdefault("countdown", backoff(task, request.retries))
        options.setdefault("exc", error)
        raise task.retry(**options) from error


def backoff(task: Any, retries: int) -> int:
    """Return the seconds before the next retry: exponential, with jitter if `retry_jitter` is set."""
    maximum = int(task.retry_backoff_max)
    seconds = int(min(maximum, max(1, int(task.retry_backoff)) * 2 ** min(retries, 60)))
    return random.randrange(seconds + 1) if task.retry_jitter else max(0, seconds)


def _callbacks(task: Any, request: Context, value: Any) -> None:
    """Enqueue the linked callbacks. They take effect only if this attempt succeeds."""
    for link in request.callbacks or ():
        callback = task.app.signature(link)
        if request.is_eager:
            callback.apply((value,))
        else:
            callback.apply_async((value,), on_success=request.native is not None)


def call_errbacks(task: Any, request: Context, raised: BaseException) -> None:
    """Call the error callbacks: here if they take request, exception and traceback; otherwise enqueue them."""
    for link in request.errbacks or ():
        errback = task.app.signature(link)
        error = raised
        if errback.options.pop("of_chord", False):
            error = ChordError(f"Dependency {request.id} raised {raised!r}")
            error.__cause__ = raised
        target = task.app.tasks.get(errback["task"])
        if target is not None and _takes_more_than_an_id(target):
            errback(request, error, "".join(traceback.format_exception(error)))
        elif request.is_eager:
            errback.apply((request.id,))
        else:
            errback.apply_async((request.id,))


def _takes_more_than_an_id(task: Any) -> bool:
    """Return whether an errback takes request, exception and traceback. Celery passes bound ones the id only."""
    parameters = task._function_signature.parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if task.bind:
        return sum(p.default is p.empty for p in positional) > 1
    return len(positional) > 1 or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)


# -- right here


def run_eagerly(
    task: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    link: Any,
    link_error: Any,
    task_id: str | None,
    retries: int,
    throw: bool | None,
    options: Mapping[str, Any],
) -> Any:
    """Run a call in this process, with immediate retries; return its EagerResult."""
    app = task.app
    identifier = task_id or uuid()
    throw = app.conf.task_eager_propagates if throw is None else throw
    current_args, current_kwargs = list(args), dict(kwargs)
    while True:
        outer = requests.current.get()
        request = Context(
            id=identifier,
            task=task.name,
            args=current_args,
            kwargs=current_kwargs,
            retries=retries,
            is_eager=True,
            called_directly=False,
            headers=options.get("headers") or {},
            hostname=hostname(),
            callbacks=listed(link),
            errbacks=listed(link_error),
            delivery_info={
                "is_eager": True,
                "exchange": options.get("exchange"),
                "routing_key": options.get("routing_key"),
                "priority": options.get("priority"),
            },
            root_id=(outer[1].root_id if outer else None) or identifier,
            parent_id=outer[1].id if outer else None,
            correlation_id=identifier,
        )
        token = requests.current.set((task, request))
        try:
            state, value = attempt(task, request)
        except (OrchestratorError, TimeLimitExceeded) as error:
            state, value = states.FAILURE, error
        finally:
            requests.current.reset(token)
        if state != states.RETRY:
            break
        new_args, new_kwargs = value.sig or (None, None)
        current_args = current_args if new_args is None else list(new_args)
        current_kwargs = current_kwargs if new_kwargs is None else dict(new_kwargs)
        retries += 1
    if state == states.FAILURE and throw:
        raise value
    if state in (states.IGNORED, states.REJECTED):
        state, value = request.state or (state, None)
    einfo = ExceptionInfo(value).traceback if isinstance(value, BaseException) else None
    return EagerResult(identifier, value, state, traceback=einfo, name=task.name)
