"""Tasks as they are created, and reports of workers.

Messages between processes are these structs as MessagePack arrays: small, fast, typed, and never pickle.
Ids are 16 raw bytes in messages. Field order is the wire format; new fields go last, with a default.
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
    """Options that travel with a task beside its arguments; the default of each costs nothing to store."""

    retry: RetryPolicy = RetryPolicy()
    timeout: float | None = None
    """Seconds that one attempt may run."""
    isolation: Isolation = "thread"
    """Where a synchronous function runs: a thread of the worker, or a child process that can be killed."""
    concurrency: int | None = None
    """How many of its lane may be in flight at once."""
    total_concurrency: int | None = None
    """How many of the task may be in flight at once, all lanes together."""
    rate: Rate | None = None
    """How often one of its lane may start."""
    total_rate: Rate | None = None
    """How often the task may start, all lanes together."""
    weight: float = 1.0
    """How many turns its lane gets for one of another."""
    store_result: bool = True
    """Keep what it returns."""
    soft_timeout: float | None = None
    """Seconds after which `SoftTimeout` is raised inside the task."""
    unique_for: Literal["pending", "running"] | None = None
    """How long it keeps its unique key, which it takes back when it is opened again; None for a period."""
    redact: tuple[str, ...] = ()
    """Fields of its arguments and result that are not shown: patterns of `domain.redaction`."""
    executor: ExecutorCall | None = None
    """The executor call; None: the worker's own Python runs it."""
    inherited: tuple[str, ...] = ()
    """`redact` patterns of tasks that it may have values from."""
    headers: dict[str, str] = {}
    """Texts that middleware and the task read (`ctx.headers`); `domain/tasks/headers.py` has their bounds."""
    on_loss: OnLoss = "retry"
    """Whether it is started again if its worker is lost with it."""
    max_starts: int | None = None
    """How often it is started at most, however its attempts end."""

    @property
    def hidden(self) -> tuple[str, ...]:
        """All patterns of what is not shown."""
        return (*self.redact, *self.inherited)


DEFAULT_OPTIONS = TaskOptions()


@lru_cache(maxsize=4096)
def parse_options(text: str | None) -> TaskOptions:
    """Decode stored options; tasks of one kind share them. What another release wrote and makes no sense is default."""
    try:
        return msgspec.json.decode(text, type=TaskOptions) if text else DEFAULT_OPTIONS
    except (msgspec.DecodeError, RecursionError):
        return DEFAULT_OPTIONS


@lru_cache(maxsize=4096)
def with_inherited(text: str | None, patterns: tuple[str, ...]) -> str | None:
    """Return stored options with patterns of those that a task may have values from."""
    options = parse_options(text)
    if not {*patterns}.difference(options.hidden):
        return text
    inherited = tuple(dict.fromkeys((*options.inherited, *patterns)))
    return msgspec.json.encode(msgspec.structs.replace(options, inherited=inherited)).decode()


_NAMES_EXECUTOR = '"executor"'


def executor_of(options: str | None) -> ExecutorCall | None:
    """Return what does a task with these stored options outside the worker's own Python, if anything."""
    return None if options is None or _NAMES_EXECUTOR not in options else parse_options(options).executor


class UniqueKey(msgspec.Struct, frozen=True, array_like=True):
    """A key that only one task may have at a time."""

    key: str
    scope: KeyScope
    """Until when: the task is claimed, it has ended, or a period has passed."""
    period: float | None = None
    """Seconds, for the scope `period`."""
    on_duplicate: DuplicatePolicy = "return"
    same_call: bool = False
    """It belongs to one call: another one under this key is refused."""
    same_options: bool = False
    """The queue, the priority and the options belong to that call, as they do where a request names all of them."""


class KeyHolder(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a running task that wants another one under a key."""

    id: Id
    """The task that has the key."""
    is_other_call: bool = False
    """The key belongs to another call, and what was wanted was refused."""
    error: TaskError | None = None
    """Why there is nothing under this id, if so."""


def own_key(kind: Literal["once", "unique"], task: str, key: str) -> str:
    """Return a key of one task as it stands among those of all; no two that differ give the same."""
    return f"{_before_key(kind, task)}{key}"


def given_key(task: str, key: str) -> str:
    """Return the key of a task as it was given, without what keeps it apart from others."""
    for prefix in (_before_key("once", task), _before_key("unique", task), _before_key("once", "")):
        if key.startswith(prefix):
            return key[len(prefix) :]
    return key


def _before_key(kind: str, task: str) -> str:
    if ":" in task:  # of which `a:b` and `c` would read like `a` and `b:c`; no name has this separator
        return f"{kind}|{task}|"
    return f"{kind}:{task}:"


class NewTask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A task to be created. It is part of no cycle, and a million of them are nothing for a collector to go through."""

    id: bytes
    name: str
    queue: str
    payload: bytes
    priority: int = 0
    delay: float = 0.0
    options: str | None = None
    """TaskOptions as JSON, or None where all are defaults."""
    run_id: bytes | None = None
    position: int | None = None
    step: str | None = None
    lane: str | None = None
    """Its lane, `task|key`; see `domain/limits/lanes.py`."""
    expires: float | None = None
    """Seconds within which it must have started."""
    unique: UniqueKey | None = None
    callbacks: str | None = None
    """Tasks to create when it ends, as JSON."""
    trace: str | None = None
    """The span that it came of, as a W3C traceparent. It says nothing about the call: others may differ in it."""
    parent: bytes | None = None
    """The task that enqueued it while it ran, or that it follows."""

    @property
    def unique_key(self) -> str | None:
        return None if self.unique is None else self.unique.key

    @property
    def is_ready(self) -> bool:
        """Say whether it can be claimed at once, and that is all: it has no time, limit or key to look at first."""
        return self.delay <= 0 and self.lane is None and self.expires is None and self.unique is None


def differing_options(task: NewTask, queue: str, priority: int, options: str | None, lane: str | None) -> Iterator[str]:
    """Yield in words what is not the same where another task has this queue, priority, options and lane."""
    if queue != task.queue:
        yield f"the queue {queue!r}, here {task.queue!r}"
    if priority != task.priority:
        yield f"the priority {priority}, here {task.priority}"
    before, after = _asked(parse_options(options)), _asked(parse_options(task.options))
    for name in TaskOptions.__struct_fields__:
        if getattr(before, name) != getattr(after, name):
            yield "other retries" if name == "retry" else f"another {name}"
    if _concurrency_key(lane) != _concurrency_key(task.lane):
        yield "another concurrency_key"


def _asked(options: TaskOptions) -> TaskOptions:
    """Return options without what is no part of the call: names to hide that came from the task itself, and headers."""
    own = tuple(pattern for pattern in options.redact if pattern not in options.inherited)
    return msgspec.structs.replace(options, redact=own, inherited=(), headers={})


def _concurrency_key(lane: str | None) -> str:
    return "" if lane is None else lane.partition("|")[2]


class Dispatch(msgspec.Struct, frozen=True, array_like=True):
    """One task on its way to a worker."""

    id: Id
    attempt: AttemptNumber
    name: str
    payload: bytes
    queue: str
    options: str | None = None
    run_id: Id | None = None
    position: int | None = None
    alone: bool = False
    """Run in a child process: its last attempt took a worker down, and its neighbours must not pay again."""
    failures: int = 0
    """How often it has failed before."""
    details: bytes | None = None
    """The details that an earlier attempt left for this one."""
    trace: str | None = None
    """The span that it came of, as a W3C traceparent."""
    at: float = 0.0
    """Of a task of a run: when it was sent, by the leader's clock, in Unix seconds."""

    @property
    def is_turn_task(self) -> bool:
        """Say whether this is a turn of a workflow's code: a run's turn task has the run's id."""
        return self.run_id == self.id


LOST = "worker lost"
"""The reason of a task that failed because the processes that ran it died."""


def error_text(kind: str, message: str) -> str:
    """Return an error as Python prints it: one without a message is only its kind."""
    return f"{kind}: {message}" if message else kind


class TaskError(msgspec.Struct, frozen=True, array_like=True):
    """The error of an attempt."""

    kind: str
    message: str
    traceback: str = ""
    data: str = ""
    """The exception's attributes, as a JSON object; empty if there are none."""
    phase: str = ""
    """Of a query or an update, how far it came: a key of `errors.HANDLER_ERRORS`."""

    @classmethod
    def stored(cls, fields: Mapping[str, str] | None) -> TaskError | None:
        """Return an error as `to_json` has written it."""
        if fields is None:
            return None
        named = (fields.get(name, "") for name in ("traceback", "data", "phase"))
        return cls(fields["kind"], fields["message"], *named)

    @property
    def attributes(self) -> dict[str, Any]:
        """The exception's attributes; none where they cannot be read."""
        try:
            return msgspec.json.decode(self.data, type=dict[str, Any]) if self.data else {}
        except (msgspec.DecodeError, RecursionError):
            return {}

    def to_json(self) -> str:
        """Return it as it is stored. The data stays a text, in which no store finds anything to change or refuse."""
        fields = {"kind": self.kind, "message": self.message, "traceback": self.traceback}
        more = {"data": self.data, "phase": self.phase}
        return msgspec.json.encode(fields | {name: text for name, text in more.items() if text}).decode()


WITHDRAWN = "TaskWithdrawn"
"""The kind of error of a task that was cancelled because no worker had been given it."""


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """The worker has begun to run the attempt, `age` seconds ago."""

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
    """Tasks that exist only if this success is the one that counts."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The attempt raised, timed out, or could not be started."""

    id: bytes
    attempt: int
    duration: float
    error: TaskError
    retryable: bool = True
    delay: float | None = None
    """Seconds before the next try, where the task itself has decided them."""
    charged: bool = True
    """It counts as a failure; a task that asked to be tried again later has not failed."""
    lingering: bool = False
    """The attempt has ended, but its code would not: it still runs, until its worker process has been replaced."""


class Returned(msgspec.Struct, frozen=True, array_like=True, tag="returned"):
    """The worker gives the attempt back unstarted or unfinished; it costs no try."""

    id: bytes
    attempt: int
    reason: str
    delay: float = 0.0
    unknown: str = ""
    """Its name, if the worker does not know it, or was not given what it needs."""
    data_key: str = ""
    """The id of the data key that the worker lacks: that is this task's own trouble, and none of its name."""
    executor: ExecutorCall | None = None
    """What the task is declared with, where it was enqueued by its name alone: from now on that does it."""
    begun: bool = False
    """Its code may have begun. A worker of an earlier release does not say."""


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """The process that had the attempt died, as its parent reports, or was not heard from, as the leader finds."""

    id: bytes
    attempt: int
    alone: bool
    """It had the process that died to itself, so nobody else can have brought it down."""
    reason: str = ""
    """What the process died of, e.g. `exit code 3`, or why it was given up; empty if nobody knows."""
    unheard: float = 0.0
    """Seconds for which its worker was not heard from, if that is all that is known."""


class Enqueued(msgspec.Struct, frozen=True, array_like=True, tag="enqueued"):
    """A running task enqueued others."""

    tasks: list[NewTask]


class Noted(msgspec.Struct, frozen=True, array_like=True, tag="noted"):
    """The running attempt leaves something for the next one, in place of what it left before."""

    id: bytes
    attempt: int
    details: bytes


class KnownTask(msgspec.Struct, frozen=True, array_like=True):
    """A task that a worker has had."""

    id: bytes
    name: str
    state: str
    """What it last did: `running`, or the kind of the report that ended its attempt."""


class Recalled(msgspec.Struct, frozen=True, array_like=True, tag="recalled"):
    """Postgres has lost commits, and these are tasks that it should know.

    It is sent only to a leader that announces lost commits: earlier releases do neither.
    """

    tasks: list[KnownTask]
