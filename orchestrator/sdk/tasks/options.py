"""The options of a task, set on the decorator or for a call, and checked at once."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar, get_args
from uuid import UUID

import msgspec

from orchestrator.domain import redaction
from orchestrator.domain.executors.options import ExecutorOptions
from orchestrator.domain.executors.record import ExecutorCall
from orchestrator.domain.limits.buckets import Rate
from orchestrator.domain.limits.lane_limits import lane_name
from orchestrator.domain.tasks.headers import check_headers
from orchestrator.domain.tasks.retry import RetryPolicy
from orchestrator.domain.tasks.task import (
    DEFAULT_OPTIONS,
    DuplicatePolicy,
    Isolation,
    OnLoss,
    TaskOptions,
    UniqueKey,
    own_key,
)
from orchestrator.errors import InvalidTask, did_you_mean
from orchestrator.sdk.checks import (
    check_key,
    check_name,
    check_options,
    check_rate,
    check_seconds,
    check_timezone,
    check_weight,
    in_seconds,
)
from orchestrator.sdk.tasks.retry import Retry, executor_call

DEFAULT_QUEUE = "default"
_MAX_ENCODED = 100
"""Cached encodings of the options of one task, at most."""
_PRIORITIES = range(-100, 101)
_RETRIES = range(1_000_001)
_SCOPES = ("pending", "running")

T = TypeVar("T")
Computed = Callable[..., T]
"""A function that receives the arguments of the call by keyword: `lambda customer, **_: customer`."""
Key = str | int | UUID
"""A key; `7` and `"7"` are the same key."""


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """The options of a task."""

    queue: str | None = None
    """The queue of the task. By default, the application's routes decide, else it is `default`."""
    priority: int = 0
    """The priority, from -100 to 100; higher priorities go first."""
    delay: float | timedelta = 0.0
    """Seconds before the task may start. Not to be confused with `task.delay(…)`, Celery's name for `enqueue`."""
    retries: int | Retry | Sequence[float | timedelta] = 0
    """The number of retries after failures, a list of waits before each retry, or a `Retry` policy."""
    timeout: float | timedelta | None = None
    """Seconds that one attempt may run. Then the attempt has failed, whatever the function is doing."""
    isolation: Isolation = "thread"
    """Where a synchronous function runs: `thread`, or `process` for a child process that can be killed."""
    on_success: bool | Any = False
    """A task or several to enqueue with the result. True, inside a task: enqueue only if the calling task succeeds."""
    on_failure: Any = None
    """A task or several to enqueue with a `TaskFailure` if the task fails for good."""
    store_result: bool = True
    """Whether to store the return value; otherwise the result is None."""
    eta: datetime | None = None
    """The earliest start, as a datetime with a time zone."""
    expires: float | timedelta | datetime | None = None
    """The latest start, in seconds from now or as a datetime. A task that has not started by then fails as expired."""
    unique_key: Key | Computed[Key | None] | None = None
    """A key that only one task of this name may hold at a time."""
    unique_for: Literal["pending", "running"] | float | timedelta = "running"
    """How long the task holds its unique key: `pending` until a worker gets it, `running` until it ends, or seconds."""
    on_duplicate: DuplicatePolicy = "return"
    """If another task holds the key: `return` a handle to it, `replace` its arguments while it waits, or `raise`."""
    idempotency_key: Key | None = None
    """Repeated calls with the same key enqueue only one task, for as long as the setting `idempotency_period`."""
    concurrency: int | None = None
    """How many tasks may run at once in the fleet, for each `concurrency_key` or else for all calls of this task."""
    concurrency_key: Key | Computed[Key | None] | None = None
    """A key such as the customer. Keys take turns, and `concurrency` and `rate` apply to each key."""
    total_concurrency: int | None = None
    """How many tasks may run at once in the fleet, over all keys."""
    rate: str | Rate | None = None
    """How often a task may start, e.g. `10/s`, for each `concurrency_key` or else for all calls of this task."""
    total_rate: str | Rate | None = None
    """How often a task may start, over all keys."""
    weight: float | Computed[float] = 1.0
    """How many turns the key gets for each turn of a key of weight 1."""
    soft_timeout: float | timedelta | None = None
    """Seconds after which `SoftTimeout` is raised inside the task, which may catch it to clean up."""
    redact: Sequence[str] = ()
    """Arguments to hide, and fields of arguments or of the result: `("token", "card.*")`."""
    executor: ExecutorOptions | str | None = None
    """An executor that runs instead of the function, which then only declares the signature; options or a name."""
    executor_options: Mapping[str, Any] | None = None
    """The options of an executor that `executor` names."""
    headers: Mapping[str, str] | None = None
    """Text headers for the task and for all tasks and runs it starts. The task reads them as `ctx.headers`."""
    on_loss: OnLoss = "retry"
    """What to do if the worker dies: `retry` the task, or `fail` it, so that it never runs twice unintentionally."""
    max_starts: int | None = None
    """How often the task may start in total, including failed and lost attempts."""
    _of_settings: tuple[str, ...] = ()
    """The patterns of the setting `redact`."""

    def __post_init__(self) -> None:
        if self.queue is not None:
            check_name("queue", self.queue)
        if isinstance(self.priority, bool) or not isinstance(self.priority, int) or self.priority not in _PRIORITIES:
            raise InvalidTask(f"Option priority: expected a whole number from -100 to 100, found {self.priority!r}.")
        if check_seconds("delay", self.delay) < 0:
            raise InvalidTask(f"Option delay: expected zero or more seconds, found {self.delay!r}.")
        if self.timeout is not None and check_seconds("timeout", self.timeout) <= 0:
            raise InvalidTask(f"Option timeout: expected more than zero seconds, found {self.timeout!r}.")
        if self.soft_timeout is not None:
            self._check_soft_timeout(check_seconds("soft_timeout", self.soft_timeout))
        if isinstance(self.retries, (list, tuple)):
            object.__setattr__(self, "retries", Retry(backoff=self.retries))
        if (
            isinstance(self.retries, bool)
            or not isinstance(self.retries, (int, Retry))
            or self.policy.max not in _RETRIES
        ):
            raise InvalidTask(f"Option retries: expected zero or more, or a Retry, found {self.retries!r}.")
        if self.isolation not in get_args(Isolation):
            raise InvalidTask(f"Option isolation: expected 'thread' or 'process', found {self.isolation!r}.")
        if self.on_loss not in get_args(OnLoss):
            raise InvalidTask(f"Option on_loss: expected 'retry' or 'fail', found {self.on_loss!r}.")
        if not isinstance(self.store_result, bool):
            raise InvalidTask(f"Option store_result: expected True or False, found {self.store_result!r}.")
        if isinstance(self.redact, str) or not all(isinstance(pattern, str) and pattern for pattern in self.redact):
            raise InvalidTask(f'Option redact: expected names such as ("token", "card.*"), found {self.redact!r}.')
        if self.headers is not None:
            check_headers(self.headers)
        self._check_executor()
        self._check_times()
        self._check_keys()
        self._check_limits()

    @cached_property
    def executor_call(self) -> ExecutorCall | None:
        """The executor call of a task that runs outside the worker's Python; else None."""
        return executor_call(self.executor, self.executor_options)

    def _check_executor(self) -> None:
        if self.executor_call is None:
            return
        if self.soft_timeout is not None:
            raise InvalidTask(
                "Option soft_timeout: it is raised inside a Python function, which an executor does not run. Use "
                "timeout."
            )
        if self.isolation != "thread":
            raise InvalidTask(
                f"Option isolation: an executor does not run a Python function, found {self.isolation!r}."
            )

    def _check_times(self) -> None:
        if self.eta is not None:
            if check_seconds("delay", self.delay):
                raise InvalidTask("Options delay and eta: give one of them, not both.")
            check_timezone("eta", self.eta)
        if isinstance(self.expires, datetime):
            check_timezone("expires", self.expires)
        elif self.expires is not None and check_seconds("expires", self.expires) <= 0:
            raise InvalidTask(f"Option expires: expected more than zero seconds, or a time, found {self.expires!r}.")

    def _check_keys(self) -> None:
        if self.unique_key is not None and self.idempotency_key is not None:
            raise InvalidTask("Options unique_key and idempotency_key: give one of them, not both.")
        if self.unique_for not in _SCOPES and (
            isinstance(self.unique_for, str) or check_seconds("unique_for", self.unique_for) <= 0
        ):
            near = did_you_mean(self.unique_for, _SCOPES) if isinstance(self.unique_for, str) else ""
            raise InvalidTask(
                f"Option unique_for: expected 'pending', 'running' or a number of seconds above zero, "
                f"found {self.unique_for!r}.{near or in_seconds(self.unique_for)}"
            )
        if self.on_duplicate not in get_args(DuplicatePolicy):
            raise InvalidTask(
                f"Option on_duplicate: expected 'return', 'replace' or 'raise', found {self.on_duplicate!r}."
            )
        for name in ("unique_key", "idempotency_key", "concurrency_key"):
            value = getattr(self, name)
            if value is not None and (name == "idempotency_key" or not callable(value)):
                check_key(name, value)

    def _check_limits(self) -> None:
        for name in ("concurrency", "total_concurrency", "max_starts"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidTask(f"Option {name}: expected a whole number above zero, found {value!r}.")
        for name in ("rate", "total_rate"):
            check_rate(name, getattr(self, name))
        if not callable(self.weight):
            check_weight(self.weight)

    def _check_soft_timeout(self, seconds: float) -> None:
        if seconds <= 0:
            raise InvalidTask(f"Option soft_timeout: expected more than zero seconds, found {self.soft_timeout!r}.")
        if self.timeout is not None and seconds >= check_seconds("timeout", self.timeout):
            raise InvalidTask(
                f"Option soft_timeout: expected less than the timeout ({self.timeout!r}), so that the task has time to "
                f"clean up; found {self.soft_timeout!r}."
            )

    @property
    def policy(self) -> RetryPolicy:
        if isinstance(self.retries, Retry):
            return self.retries._policy
        assert isinstance(self.retries, int)
        return RetryPolicy(max=self.retries)

    @property
    def timeout_seconds(self) -> float | None:
        return None if self.timeout is None else check_seconds("timeout", self.timeout)

    @property
    def delay_seconds(self) -> float:
        if self.eta is not None:
            return self.eta.timestamp() - time.time()
        return self._delay

    @cached_property
    def _delay(self) -> float:
        return check_seconds("delay", self.delay)

    @property
    def expiry_seconds(self) -> float | None:
        if self.expires is None:
            return None
        if isinstance(self.expires, datetime):
            return max(0.0, self.expires.timestamp() - time.time())
        return check_seconds("expires", self.expires)

    @property
    def is_computed(self) -> bool:
        return callable(self.unique_key) or callable(self.concurrency_key) or callable(self.weight)

    def fixed(self, arguments: Mapping[str, Any]) -> CallOptions:
        """Return these options with the concurrency key and the weight computed from the arguments of a call."""
        return dataclasses.replace(
            self, concurrency_key=_compute(self.concurrency_key, arguments), weight=_compute(self.weight, arguments)
        )

    def to_task_options(self, weight: float) -> TaskOptions:
        default = DEFAULT_OPTIONS  # msgspec omits a value if it is the very same object as the default
        return TaskOptions(
            retry=self.policy,  # even without retries: a hook would otherwise use its own default
            timeout=self.timeout_seconds,
            isolation=self.isolation,
            concurrency=self.concurrency,
            total_concurrency=self.total_concurrency,
            rate=check_rate("rate", self.rate),
            total_rate=check_rate("total_rate", self.total_rate),
            store_result=self.store_result,
            weight=default.weight if weight == default.weight else weight,
            soft_timeout=None if self.soft_timeout is None else check_seconds("soft_timeout", self.soft_timeout),
            redact=tuple(self.redact) or default.redact,
            inherited=self._of_settings or default.inherited,
            executor=self.executor_call,
            headers=dict(self.headers or ()),
            on_loss=self.on_loss,
            max_starts=self.max_starts,
        )

    def redacting(self, everywhere: Sequence[str], names: Sequence[str]) -> CallOptions:
        """Return these options with `redact` patterns for positional arguments too. `names` are the parameter names."""
        if not (self.redact or everywhere):
            return self
        redact = dict.fromkeys((*self.redact, *redaction.placed((*self.redact, *everywhere), names)))
        return dataclasses.replace(self, redact=tuple(redact), _of_settings=tuple(everywhere))

    def placed(self, task: str, arguments: Mapping[str, Any], idempotency_period: float) -> Placed:
        """Return the lane, the unique key and the encoded options of a call."""
        weight = check_weight(_compute(self.weight, arguments))
        key = _compute(self.concurrency_key, arguments)
        unique = self._unique(task, arguments, idempotency_period)
        scope = None if unique is None or unique.scope == "period" else unique.scope
        options, encoded = self._encoded.get((weight, scope)) or self._encode(weight, scope)
        lane = lane_name(task, None if key is None else check_key("concurrency_key", key), options)
        return Placed(lane=lane, unique=unique, options=encoded)

    @cached_property
    def _encoded(self) -> dict[tuple[float, str | None], tuple[TaskOptions, str | None]]:
        """A cache of encoded options by weight and scope of the unique key; thousands of tasks share an entry."""
        return {}

    def _encode(self, weight: float, scope: str | None) -> tuple[TaskOptions, str | None]:
        options = self.to_task_options(weight)
        if scope is not None:
            options = msgspec.structs.replace(options, unique_for=scope)
        if len(self._encoded) >= _MAX_ENCODED:
            self._encoded.clear()
        entry = options, None if options == DEFAULT_OPTIONS else msgspec.json.encode(options).decode()
        self._encoded[weight, scope] = entry
        return entry

    def _unique(self, task: str, arguments: Mapping[str, Any], idempotency_period: float) -> UniqueKey | None:
        if self.idempotency_key is not None:
            return idempotency_key(task, self.idempotency_key, idempotency_period)
        computed = _compute(self.unique_key, arguments)
        if computed is None:
            return None
        key = own_key("unique", task, check_key("unique_key", computed))
        if isinstance(self.unique_for, str):
            return UniqueKey(key, self.unique_for, None, self.on_duplicate)
        return UniqueKey(key, "period", check_seconds("unique_for", self.unique_for), self.on_duplicate)


def idempotency_key(task: str, key: object, period: float) -> UniqueKey:
    full = own_key("once", task, check_key("idempotency_key", key))
    return UniqueKey(full, "period", period, same_call=True)


class Placed(NamedTuple):
    """The lane, unique key and encoded options of one call."""

    lane: str | None
    unique: UniqueKey | None
    options: str | None


OPTION_NAMES = tuple(field.name for field in dataclasses.fields(CallOptions) if field.name[0] != "_")


def with_options(base: CallOptions, changes: Mapping[str, Any]) -> CallOptions:
    """Return the options with changes. Refuse an unknown name, and suggest the nearest."""
    check_options("task", changes, OPTION_NAMES)
    return dataclasses.replace(base, **changes)


def _compute(value: Any, arguments: Mapping[str, Any]) -> Any:
    return value(**arguments) if callable(value) else value


def check_unique(task: str, unique: UniqueKey, *, in_run: bool, in_task: bool) -> None:
    """Refuse a unique key for tasks of a run, and for `replace` and `raise` inside a task."""
    if in_run:
        raise InvalidTask(f"Task {task!r} has a unique key, and a run needs all its tasks. Enqueue it instead.")
    if in_task and unique.on_duplicate != "return":
        raise InvalidTask(
            f"Option on_duplicate: inside a task only 'return' is possible, because the scheduler decides later; "
            f"found {unique.on_duplicate!r} for task {task!r}."
        )


CELERY_HINTS = {
    "apply_async": "Write {task}.options(delay=60, queue='mail').enqueue(…): countdown=60 is delay=60, eta, expires, "
    "queue and priority have the same names, link and link_error are on_success and on_failure.",
    "apply": "Call the task to run it here: {task}(…).",
    "retry": "Raise RetryLater(30) inside the task.",
    "signature": "Write {task}.options(…) for a task with other options, and {task}.s(…) for a part of a composition.",
}
"""Hints for methods that Celery's tasks have and these do not, by method name."""
