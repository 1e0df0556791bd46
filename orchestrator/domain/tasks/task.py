"""New tasks, and the reports of workers.

Messages between processes are these structs as MessagePack arrays: small, fast, typed, and never pickle. Ids in
messages are 16 raw bytes. Field order is the wire format; new fields go last, with a default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec

from orchestrator.domain.executors.record import ExecutorCall
from orchestrator.domain.limits.buckets import Rate
from orchestrator.domain.tasks.retry import RetryPolicy

Isolation = Literal["thread", "process"]
KeyScope = Literal["pending", "running", "period"]
DuplicatePolicy = Literal["return", "replace", "raise"]
OnLoss = Literal["retry", "fail"]
Id = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
AttemptNumber = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class TaskOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options stored and sent with a task beside its arguments. Default values take no space."""

    retry: RetryPolicy = RetryPolicy()
    timeout: float | None = None
    """Seconds that one attempt may run."""
    isolation: Isolation = "thread"
    """Where a synchronous function runs: in a thread of the worker, or in a child process that can be killed."""
    concurrency: int | None = None
    """Tasks in flight at once in the task's lane, at most."""
    total_concurrency: int | None = None
    """Tasks in flight at once in all lanes of this task name together, at most."""
    rate: Rate | None = None
    """The rate limit for starts in the task's lane."""
    total_rate: Rate | None = None
    """The rate limit for starts in all lanes of this task name together."""
    weight: float = 1.0
    """Turns of the task's lane for each turn of a lane with weight 1."""
    store_result: bool = True
    """Store the return value."""
    soft_timeout: float | None = None
    """Seconds after which `SoftTimeout` is raised inside the task."""
    unique_for: Literal["pending", "running"] | None = None
    """How long the task keeps its unique key, which it takes back when retried. None for a period."""
    redact: tuple[str, ...] = ()
    """Fields of the arguments and the result to redact: patterns of `domain.redaction`."""
    executor: ExecutorCall | None = None
    """The executor call. None if the worker's own Python runs the task."""
    inherited: tuple[str, ...] = ()
    """`redact` patterns of other tasks whose values this task may have received."""
    headers: dict[str, str] = {}
    """Texts for middleware and the task (`ctx.headers`). `domain/tasks/headers.py` has the limits."""
    on_loss: OnLoss = "retry"
    """Whether the task is started again after its worker was lost."""
    max_starts: int | None = None
    """Starts of the task, at most, however its attempts end."""

    @property
    def hidden(self) -> tuple[str, ...]:
        """All redaction patterns, own and inherited."""
        return (*self.redact, *self.inherited)


DEFAULT_OPTIONS = TaskOptions()


@lru_cache(maxsize=4096)
def parse_options(text: str | None) -> TaskOptions:
    """Decode stored options, cached because many tasks share them. Undecodable options count as defaults."""
    try:
        return msgspec.json.decode(text, type=TaskOptions) if text else DEFAULT_OPTIONS
    except (msgspec.DecodeError, RecursionError):
        return DEFAULT_OPTIONS


@lru_cache(maxsize=4096)
def with_inherited(text: str | None, patterns: tuple[str, ...]) -> str | None:
    """Return stored options with redaction patterns of other tasks added."""
    options = parse_options(text)
    if not {*patterns}.difference(options.hidden):
        return text
    inherited = tuple(dict.fromkeys((*options.inherited, *patterns)))
    return msgspec.json.encode(msgspec.structs.replace(options, inherited=inherited)).decode()


_NAMES_EXECUTOR = '"executor"'


def executor_of(options: str | None) -> ExecutorCall | None:
    """Return the executor call in stored options, or None for the worker's own Python."""
    return None if options is None or _NAMES_EXECUTOR not in options else parse_options(options).executor


class UniqueKey(msgspec.Struct, frozen=True, array_like=True):
    """A key that only one task may hold at a time."""

    key: str
    scope: KeyScope
    """When the key is released: when the task is claimed, when it ends, or after a period."""
    period: float | None = None
    """Seconds, for the scope `period`."""
    on_duplicate: DuplicatePolicy = "return"
    same_call: bool = False
    """The key identifies one call: a different call with this key is rejected."""
    same_options: bool = False
    """The queue, the priority and the options must be equal, too, for the call to be the same."""


class KeyHolder(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a running task that enqueued a task with a unique key that is taken."""

    id: Id
    """The task that holds the key."""
    is_other_call: bool = False
    """The key belongs to a different call, and the new task was rejected."""
    error: TaskError | None = None
    """Why no task or run with this id exists, if so."""


def own_key(kind: Literal["once", "unique"], task: str, key: str) -> str:
    """Return a task's key as a key among those of all tasks. Different pairs give different keys."""
    return f"{_key_prefix(kind, task)}{key}"


def caller_key(task: str, key: str) -> str:
    """Return the caller's key from a stored key, without the prefix that `own_key` adds."""
    for prefix in (_key_prefix("once", task), _key_prefix("unique", task), _key_prefix("once", "")):
        if key.startswith(prefix):
            return key[len(prefix) :]
    return key


def _key_prefix(kind: str, task: str) -> str:
    if ":" in task:  # otherwise `a:b` and `c` would give the same key as `a` and `b:c`; no name contains `|`
        return f"{kind}|{task}|"
    return f"{kind}:{task}:"


class NewTask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A task to create. It holds no reference cycles, so `gc=False` spares the garbage collector a million objects."""

    id: bytes
    name: str
    queue: str
    payload: bytes
    priority: int = 0
    delay: float = 0.0
    options: str | None = None
    """TaskOptions as JSON. None if all are defaults."""
    run_id: bytes | None = None
    position: int | None = None
    step: str | None = None
    lane: str | None = None
    """The lane, `task|key`; see `domain/limits/lanes.py`."""
    expires: float | None = None
    """Seconds within which the task must start."""
    unique: UniqueKey | None = None
    callbacks: str | None = None
    """Tasks to create when the task ends, as JSON."""
    trace: str | None = None
    """The parent span, as a W3C traceparent. It is not part of the call: equal calls may differ in it."""
    parent: bytes | None = None
    """The task that enqueued this task while running, or whose callback it is."""

    @property
    def unique_key(self) -> str | None:
        return None if self.unique is None else self.unique.key

    @property
    def is_ready(self) -> bool:
        """Whether the task can be claimed at once: it has no delay, lane, expiry or unique key."""
        return self.delay <= 0 and self.lane is None and self.expires is None and self.unique is None


def differing_options(task: NewTask, queue: str, priority: int, options: str | None, lane: str | None) -> Iterator[str]:
    """Yield a description of each difference between a task's options and the given ones."""
    if queue != task.queue:
        yield f"the queue {queue!r}, here {task.queue!r}"
    if priority != task.priority:
        yield f"the priority {priority}, here {task.priority}"
    theirs, own = _options_of_call(parse_options(options)), _options_of_call(parse_options(task.options))
    for name in TaskOptions.__struct_fields__:
        if getattr(theirs, name) != getattr(own, name):
            yield "other retries" if name == "retry" else f"another {name}"
    if _concurrency_key(lane) != _concurrency_key(task.lane):
        yield "another concurrency_key"


def _options_of_call(options: TaskOptions) -> TaskOptions:
    """Return options without parts that do not belong to the call: inherited redaction patterns and headers."""
    own = tuple(pattern for pattern in options.redact if pattern not in options.inherited)
    return msgspec.structs.replace(options, redact=own, inherited=(), headers={})


def _concurrency_key(lane: str | None) -> str:
    return "" if lane is None else lane.partition("|")[2]


class Dispatch(msgspec.Struct, frozen=True, array_like=True):
    """A task in a message to a worker."""

    id: Id
    attempt: AttemptNumber
    name: str
    payload: bytes
    queue: str
    options: str | None = None
    run_id: Id | None = None
    position: int | None = None
    alone: bool = False
    """Run in a child process: an earlier attempt's process died, and another death must not affect other tasks."""
    failures: int = 0
    """How many attempts have failed before."""
    details: bytes | None = None
    """The details that an earlier attempt recorded for this one."""
    trace: str | None = None
    """The parent span, as a W3C traceparent."""
    at: float = 0.0
    """For a task of a run, the time of dispatch by the leader's clock, in Unix seconds."""

    @property
    def is_turn_task(self) -> bool:
        """Whether this is a turn of a workflow's code: a run's turn task has the run's id."""
        return self.run_id == self.id


LOST = "worker lost"
"""The reason of a task that failed because the processes that ran it died."""


def error_text(kind: str, message: str) -> str:
    """Return an error as Python prints it: without a message, only the kind."""
    return f"{kind}: {message}" if message else kind


class TaskError(msgspec.Struct, frozen=True, array_like=True):
    """The error of an attempt."""

    kind: str
    message: str
    traceback: str = ""
    data: str = ""
    """The exception's attributes, as a JSON object. Empty if there are none."""
    phase: str = ""
    """How far a query or an update got: a key of `errors.HANDLER_ERRORS`."""

    @classmethod
    def stored(cls, fields: Mapping[str, str] | None) -> TaskError | None:
        """Return the error that `to_json` encoded."""
        if fields is None:
            return None
        named = (fields.get(name, "") for name in ("traceback", "data", "phase"))
        return cls(fields["kind"], fields["message"], *named)

    @property
    def attributes(self) -> dict[str, Any]:
        """The exception's attributes. Empty if they cannot be decoded."""
        try:
            return msgspec.json.decode(self.data, type=dict[str, Any]) if self.data else {}
        except (msgspec.DecodeError, RecursionError):
            return {}

    def to_json(self) -> str:
        """Return the error as stored. `data` stays a string, so that jsonb neither changes nor rejects its content."""
        fields = {"kind": self.kind, "message": self.message, "traceback": self.traceback}
        more = {"data": self.data, "phase": self.phase}
        return msgspec.json.encode(fields | {name: text for name, text in more.items() if text}).decode()


WITHDRAWN = "TaskWithdrawn"
"""The error kind of a task that was cancelled before it was given to a worker."""


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """The worker started the attempt `age` seconds ago."""

    id: bytes
    attempt: int
    age: float


class Succeeded(msgspec.Struct, frozen=True, array_like=True, tag="succeeded"):
    """The attempt returned."""

    id: bytes
    attempt: int
    duration: float
    result: bytes
    children: list[NewTask] = []
    """Tasks to create only if this success is applied."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The attempt raised, timed out, or could not be started."""

    id: bytes
    attempt: int
    duration: float
    error: TaskError
    retryable: bool = True
    delay: float | None = None
    """Seconds before the next attempt, if the task itself decides."""
    charged: bool = True
    """Count it as a failure. A task that asked to be retried later has not failed."""
    lingering: bool = False
    """The attempt timed out but its code still runs, until its worker process is replaced."""


class Returned(msgspec.Struct, frozen=True, array_like=True, tag="returned"):
    """The worker returns the attempt unstarted or unfinished. It does not count as a failure."""

    id: bytes
    attempt: int
    reason: str
    delay: float = 0.0
    unknown: str = ""
    """The task's name, if the worker does not know the task or lacks something that the task needs."""
    data_key: str = ""
    """The id of the data key that the worker lacks. Only this task is affected, not all tasks of its name."""
    executor: ExecutorCall | None = None
    """The executor of the task's declaration, if the task was enqueued by name alone. It is used from now on."""
    begun: bool = False
    """The code may have begun. Workers of earlier releases do not report it."""


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """The attempt's process died or was killed, as its parent reports, or was silent too long, as the leader finds."""

    id: bytes
    attempt: int
    alone: bool
    """The dead process ran only this attempt, so no other task can have caused the death."""
    reason: str = ""
    """The cause of death, e.g. `exit code 3`, or why the process was given up. Empty if unknown."""
    unheard: float = 0.0
    """Seconds since the worker's last heartbeat, if nothing else is known."""


class Enqueued(msgspec.Struct, frozen=True, array_like=True, tag="enqueued"):
    """A running task enqueued other tasks."""

    tasks: list[NewTask]


class Noted(msgspec.Struct, frozen=True, array_like=True, tag="noted"):
    """The running attempt recorded details for the next attempt. They replace earlier ones."""

    id: bytes
    attempt: int
    details: bytes


class KnownTask(msgspec.Struct, frozen=True, array_like=True):
    """A task that a worker has had."""

    id: bytes
    name: str
    state: str
    """The last known state: `running`, or the kind of the report that ended the attempt."""


class Recalled(msgspec.Struct, frozen=True, array_like=True, tag="recalled"):
    """Tasks that a worker has had and that Postgres may be missing after it lost commits.

    Workers send it only to a leader that announces lost commits. Earlier releases know neither message.
    """

    tasks: list[KnownTask]
