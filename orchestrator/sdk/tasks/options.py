"""The options of a task, given on the decorator or per call, checked at once."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar, get_args
from uuid import UUID

import msgspec

from orchestrator.domain import redaction
from orchestrator.domain.durations import parse_duration
from orchestrator.domain.executors.call import ExecutorCall
from orchestrator.domain.executors.options import ExecutorOptions
from orchestrator.domain.limits.buckets import Rate, bucket_size, parse_rate
from orchestrator.domain.limits.names import LONGEST_KEY, key_text, lane_name
from orchestrator.domain.tasks.retry import RetryPolicy
from orchestrator.domain.tasks.task import DEFAULT_OPTIONS, DuplicatePolicy, Isolation, TaskOptions, UniqueKey
from orchestrator.errors import InvalidTask, InvalidWorkflow, UnknownOption, did_you_mean
from orchestrator.sdk.tasks.executors import executor_call
from orchestrator.sdk.tasks.retry import Retry
from orchestrator.settings import SHORTEST_RETENTION

DEFAULT_QUEUE = "default"
_NAME = re.compile(r"[\w.:/-]{1,128}")
_PRIORITIES = range(-100, 101)
_RETRIES = range(1_000_001)
_SCOPES = ("pending", "running")
SECONDS = "a number of seconds or a timedelta, up to a hundred years"
_CENTURY = 100 * 365 * 86_400
_LONGEST_LABEL = 500
_MOST_TAGS = 100

T = TypeVar("T")
Computed = Callable[..., T]
"""A function of the call's arguments, by name: `lambda customer, **_: customer`."""
Key = str | int | UUID
"""A key: `7` and `"7"` are the same one."""


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """How a task is run."""

    queue: str | None = None
    """The queue it waits in; if none is given, what the application's routes say, or `default`."""
    priority: int = 0
    """From -100 to 100; higher goes first."""
    delay: float | timedelta = 0.0
    """Seconds before it may start. The method `task.delay(…)` is another thing: `enqueue` by Celery's name."""
    retries: int | Retry | Sequence[float | timedelta] = 0
    """How often a failed attempt is tried again; or the waits before each retry; or a whole Retry policy."""
    timeout: float | timedelta | None = None
    """Seconds that one attempt may run; then it ends, whatever it does."""
    isolation: Isolation = "thread"
    """Where a synchronous function runs: `thread`, or `process` for a child process that can be killed."""
    on_success: bool | Any = False
    """A task, or several, to enqueue with its result; or True: inside a task, let it exist only if that succeeds."""
    on_failure: Any = None
    """A task, or several, to enqueue with a TaskFailure if it fails for good."""
    store_result: bool = True
    """Keep what it returns; without, its result is None."""
    eta: datetime | None = None
    """The time, with its zone, before which it may not start."""
    expires: float | timedelta | datetime | None = None
    """Seconds, or the time, by which it must have started; otherwise it fails as expired."""
    unique_key: Key | Computed[Key | None] | None = None
    """A key that only one such task may have at a time."""
    unique_for: Literal["pending", "running"] | float | timedelta = "running"
    """How long the key is kept: until it is handed to a worker, until it has ended, or so many seconds."""
    on_duplicate: DuplicatePolicy = "return"
    """If another has the key: `return` a handle to that one, `replace` its arguments while it waits, or `raise`."""
    idempotency_key: Key | None = None
    """The same key enqueues the task once, however often it is tried; kept for the setting idempotency_period."""
    concurrency: int | None = None
    """How many may run at once in the whole fleet: of each key if there is a concurrency_key, else of the task."""
    concurrency_key: Key | Computed[Key | None] | None = None
    """Whom it is for. Keys take turns, and `concurrency` and `rate` hold for each of them."""
    total_concurrency: int | None = None
    """How many may run at once in the whole fleet, all keys together."""
    rate: str | Rate | None = None
    """How often one may start, e.g. `10/s`: of each key if there is a concurrency_key, else of the task."""
    total_rate: str | Rate | None = None
    """How often one may start, all keys together."""
    weight: float | Computed[float] = 1.0
    """How many turns its key gets for one of another."""
    soft_timeout: float | timedelta | None = None
    """Seconds after which `SoftTimeout` is raised inside the task, which may catch it to clean up."""
    redact: Sequence[str] = ()
    """Arguments, and fields of these and of the result, that nobody is shown: `("token", "card.*")`."""
    executor: ExecutorOptions | str | None = None
    """What does the task in place of the function, which gives the signature: `Process(command=["tar"])`, or a name."""
    executor_options: Mapping[str, Any] | None = None
    """What is said to an executor that is given by its name."""

    def __post_init__(self) -> None:
        if self.queue is not None:
            check_name("queue", self.queue)
        if isinstance(self.priority, bool) or not isinstance(self.priority, int) or self.priority not in _PRIORITIES:
            raise InvalidTask(f"Option priority: expected a whole number from -100 to 100, found {self.priority!r}.")
        if _seconds("delay", self.delay) < 0:
            raise InvalidTask(f"Option delay: expected zero or more seconds, found {self.delay!r}.")
        if self.timeout is not None and _seconds("timeout", self.timeout) <= 0:
            raise InvalidTask(f"Option timeout: expected more than zero seconds, found {self.timeout!r}.")
        if self.soft_timeout is not None:
            self._check_soft_timeout(_seconds("soft_timeout", self.soft_timeout))
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
        if not isinstance(self.store_result, bool):
            raise InvalidTask(f"Option store_result: expected True or False, found {self.store_result!r}.")
        if isinstance(self.redact, str) or not all(isinstance(pattern, str) and pattern for pattern in self.redact):
            raise InvalidTask(f'Option redact: expected names such as ("token", "card.*"), found {self.redact!r}.')
        self._check_executor()
        self._check_times()
        self._check_keys()
        self._check_limits()

    @cached_property
    def executor_call(self) -> ExecutorCall | None:
        """What travels with a task that is done outside the worker's own Python."""
        return executor_call(self.executor, self.executor_options)

    def _check_executor(self) -> None:
        if self.executor_call is None:
            return
        if self.soft_timeout is not None:
            raise InvalidTask(
                "Option soft_timeout: it is raised inside a function, and an executor runs none. Use timeout."
            )
        if self.isolation != "thread":
            raise InvalidTask(f"Option isolation: an executor runs no function here, found {self.isolation!r}.")

    def _check_times(self) -> None:
        if self.eta is not None:
            if _seconds("delay", self.delay):
                raise InvalidTask("Options delay and eta: give one of them, not both.")
            _zoned("eta", self.eta)
        if isinstance(self.expires, datetime):
            _zoned("expires", self.expires)
        elif self.expires is not None and _seconds("expires", self.expires) <= 0:
            raise InvalidTask(f"Option expires: expected more than zero seconds, or a time, found {self.expires!r}.")

    def _check_keys(self) -> None:
        if self.unique_key is not None and self.idempotency_key is not None:
            raise InvalidTask("Options unique_key and idempotency_key: give one of them, not both.")
        if self.unique_for not in _SCOPES and (
            isinstance(self.unique_for, str) or _seconds("unique_for", self.unique_for) <= 0
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
                _key(name, value)

    def _check_limits(self) -> None:
        for name in ("concurrency", "total_concurrency"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidTask(f"Option {name}: expected a whole number above zero, found {value!r}.")
        for name in ("rate", "total_rate"):
            check_rate(name, getattr(self, name))
        if not callable(self.weight):
            _weight(self.weight)

    def _check_soft_timeout(self, seconds: float) -> None:
        if seconds <= 0:
            raise InvalidTask(f"Option soft_timeout: expected more than zero seconds, found {self.soft_timeout!r}.")
        if self.timeout is not None and seconds >= _seconds("timeout", self.timeout):
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
        return None if self.timeout is None else _seconds("timeout", self.timeout)

    @property
    def delay_seconds(self) -> float:
        if self.eta is not None:
            return self.eta.timestamp() - time.time()
        return self._delay

    @cached_property
    def _delay(self) -> float:
        return _seconds("delay", self.delay)

    @property
    def expiry_seconds(self) -> float | None:
        if self.expires is None:
            return None
        if isinstance(self.expires, datetime):
            return max(0.0, self.expires.timestamp() - time.time())
        return _seconds("expires", self.expires)

    @property
    def is_computed(self) -> bool:
        """Say whether an option depends on the arguments of the call."""
        return callable(self.unique_key) or callable(self.concurrency_key) or callable(self.weight)

    def fixed(self, arguments: Mapping[str, Any]) -> CallOptions:
        """Return these options with what the arguments of a call decide: whom it is for, and its weight."""
        return dataclasses.replace(
            self,
            concurrency_key=_compute(self.concurrency_key, arguments),
            weight=_compute(self.weight, arguments),
        )

    def travelling(self, weight: float) -> TaskOptions:
        """Return what travels with the task."""
        return TaskOptions(
            retry=self.policy,
            timeout=self.timeout_seconds,
            isolation=self.isolation,
            concurrency=self.concurrency,
            total_concurrency=self.total_concurrency,
            rate=check_rate("rate", self.rate),
            total_rate=check_rate("total_rate", self.total_rate),
            store_result=self.store_result,
            weight=DEFAULT_OPTIONS.weight if weight == DEFAULT_OPTIONS.weight else weight,  # msgspec omits by identity
            soft_timeout=None if self.soft_timeout is None else _seconds("soft_timeout", self.soft_timeout),
            redact=tuple(self.redact) or DEFAULT_OPTIONS.redact,
            executor=self.executor_call,
        )

    def redacting(self, everywhere: Sequence[str], names: Sequence[str]) -> CallOptions:
        """Return these options for a function whose arguments have these names, and may be given without them."""
        places = redaction.placed((*self.redact, *everywhere), names)
        return dataclasses.replace(self, redact=tuple(dict.fromkeys((*self.redact, *places)))) if places else self

    def placed(self, task: str, arguments: Mapping[str, Any], idempotency_period: float) -> Placed:
        """Return what a call's arguments decide: its lane, its key, and the options that travel with it."""
        weight = _weight(_compute(self.weight, arguments))
        key = _compute(self.concurrency_key, arguments)
        unique = self._unique(task, arguments, idempotency_period)
        options = self.travelling(weight)
        if unique is not None and unique.scope != "period":
            options = msgspec.structs.replace(options, unique_for=unique.scope)
        lane = lane_name(task, None if key is None else _key("concurrency_key", key), options)
        return Placed(
            lane=lane,
            unique=unique,
            options=None if options == DEFAULT_OPTIONS else msgspec.json.encode(options).decode(),
        )

    def _unique(self, task: str, arguments: Mapping[str, Any], idempotency_period: float) -> UniqueKey | None:
        if self.idempotency_key is not None:
            return once(task, self.idempotency_key, idempotency_period)
        computed = _compute(self.unique_key, arguments)
        if computed is None:
            return None
        key = f"unique:{task}:{_key('unique_key', computed)}"
        if isinstance(self.unique_for, str):
            return UniqueKey(key, self.unique_for, None, self.on_duplicate)
        return UniqueKey(key, "period", _seconds("unique_for", self.unique_for), self.on_duplicate)


def once(task: str, key: object, period: float) -> UniqueKey:
    """Return an idempotency key as a task has it."""
    return UniqueKey(f"once:{task}:{_key('idempotency_key', key)}", "period", period, same_call=True)


class Placed(NamedTuple):
    """What the arguments of one call decide."""

    lane: str | None
    unique: UniqueKey | None
    options: str | None


OPTION_NAMES = tuple(field.name for field in dataclasses.fields(CallOptions))


def with_options(base: CallOptions, given: Mapping[str, Any]) -> CallOptions:
    """Return the options changed by `given`; an unknown name is refused, with the nearest one suggested."""
    check_options("task", given, OPTION_NAMES)
    return dataclasses.replace(base, **given)


def check_options(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse an option that does not exist, and suggest the nearest."""
    for name in given:
        if name not in known:
            raise UnknownOption(
                f"Unknown {what} option {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}."
            )


def check_name(what: str, name: object) -> str:
    """Refuse a name that could not be typed, logged or used as a key."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        article = "An" if what[0] in "aeio" else "A"
        expected = f"{article} {what} name has 1 to 128 letters, digits, or any of _ . : / -"
        raise InvalidTask(f"{expected}; found {shown(name)}.")
    return name


def check_tags(tags: object) -> tuple[str, ...]:
    """Refuse tags that could not be stored and looked for."""
    if not isinstance(tags, (list, tuple)) or len(tags) > _MOST_TAGS:
        found = f"{len(tags):,}" if isinstance(tags, (list, tuple)) else shown(tags)
        raise InvalidWorkflow(f"Option tags: expected a list of at most {_MOST_TAGS} texts, found {found}.")
    return tuple(check_label("tag", tag) for tag in tags)


def check_label(what: str, text: object) -> str:
    """Refuse a key or tag that could not be stored, looked for and shown; any other text will do."""
    if not isinstance(text, str) or not 1 <= len(text) <= _LONGEST_LABEL or not text.isprintable():
        raise InvalidWorkflow(
            f"A {what} is a text of 1 to {_LONGEST_LABEL} printable characters, in one line and without controls; "
            f"found {shown(text)}."
        )
    return text


def shown(value: object) -> str:
    """Return a value for a message; of what may be endless, only the type."""
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 10**20):
        return repr(value)
    if isinstance(value, str):
        return ascii(value[:100]) + (f"… ({len(value):,} characters)" if len(value) > 100 else "")
    return f"a value of type {type(value).__qualname__}"


def _seconds(name: str, value: object) -> float:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not abs(seconds) <= _CENTURY:
        raise InvalidTask(f"Option {name}: expected {SECONDS}, found {value!r}.{in_seconds(value)}")
    return float(seconds)


def in_seconds(value: object) -> str:
    """Return what to write instead of a length of time that is given as text, or nothing."""
    if not isinstance(value, str):
        return ""
    try:
        seconds = float(value)
    except ValueError:
        found = parse_duration(value)
        return "" if found is None else f" Write {found:g}."
    return f" Write {seconds:g}." if math.isfinite(seconds) else ""


def check_retention(name: str, value: object) -> float | None:
    """Return for how many seconds ended tasks are kept, or refuse it."""
    if value is None:
        return None
    seconds = _seconds(name, value)
    if seconds != 0 and seconds < SHORTEST_RETENTION:
        raise InvalidTask(
            f"Option {name}: expected {SHORTEST_RETENTION:g} seconds or more, or 0 to keep for ever, found {value!r}."
        )
    return seconds


def check_rate(name: str, value: object) -> Rate | None:
    """Return a rate given as `Rate(...)` or as text like `10/s`, or refuse it."""
    if value is None:
        return None
    rate = parse_rate(value) if isinstance(value, str) else value
    if not isinstance(rate, Rate) or not _is_possible(rate):
        raise InvalidTask(
            f"Option {name}: expected a rate like '10/s', '100/minute' or Rate(10, per=60), found {value!r}."
        )
    return rate


def _is_possible(rate: Rate) -> bool:
    try:
        msgspec.convert(msgspec.structs.astuple(rate), Rate)  # a struct does not check its arguments
    except msgspec.ValidationError:
        return False
    return 0 < rate.count < 1e9 and 0 < rate.per < 1e9 and bucket_size(rate) < 1e9


def _compute(value: Any, arguments: Mapping[str, Any]) -> Any:
    return value(**arguments) if callable(value) else value


def _key(name: str, value: object) -> str:
    """Return a key as text that can be stored, compared and shown."""
    if (text := key_text(value)) is not None:
        return text
    raise InvalidTask(
        f"Option {name}: expected printable text of 1 to {LONGEST_KEY} characters, a whole number or a UUID, "
        f"found {value!r:.200}."
    )


def _weight(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.001 <= value <= 1000:
        raise InvalidTask(f"Option weight: expected a number from 0.001 to 1000, found {value!r}.")
    return float(value)


def _zoned(name: str, value: object) -> None:
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise InvalidTask(
            f"Option {name}: expected a datetime with a time zone, e.g. datetime.now(UTC), found {value!r}."
        )
