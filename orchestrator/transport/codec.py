"""Encode and decode messages. A message that does not decode raises `Malformed`, and the reader quarantines it.

Anyone with access to Redis can write there. Message types therefore declare the allowed values of their fields, within
the limits of Postgres and memory, and the code after this module relies on that. Reports are the exception: each is
checked when it is applied, so that a bad report does not affect the others.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from orchestrator.domain.code.activation import Activated, Activation
from orchestrator.domain.code.history import Event
from orchestrator.domain.plain import anchored
from orchestrator.domain.states import ENDED_RUN_STATES, ENDED_TASK_STATES
from orchestrator.domain.tasks.outcomes import Flush
from orchestrator.domain.tasks.task import (
    AttemptNumber,
    Dispatch,
    Failed,
    Id,
    KeyHolder,
    NewTask,
    Returned,
    Succeeded,
    TaskError,
)

M = TypeVar("M")

MAX_MESSAGE = 128_000_000
"""The maximum size of a decoded message in bytes. The largest payload that settings allow fits several times."""

Word = Annotated[str, Meta(min_length=1, max_length=300, pattern=r"^[^\x00]*$")]
"""A short name without NUL, the only character that Postgres refuses."""
Count = Annotated[int, Meta(ge=0, lt=2**31)]
_Bytes = Annotated[int, Meta(ge=0, lt=2**60)]
_Position = Annotated[str, Meta(pattern=anchored("[0-9]{1,20}-[0-9]{1,20}"))]
_EndState = Annotated[str, Meta(pattern=anchored("|".join(sorted({*ENDED_TASK_STATES, *ENDED_RUN_STATES}))))]


EndReport = Succeeded | Failed | Returned | Activated
"""The report of a child process about its only attempt."""
MAX_BUNDLE = 50
"""The maximum number of tasks in one dispatch message."""


class Malformed(ValueError):
    """The bytes are not the expected message."""


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    id: Id
    attempt: AttemptNumber


class Heartbeat(msgspec.Struct, frozen=True, array_like=True):
    """The state of a worker process, written every second by its parent."""

    worker: Word
    host: Word
    pid: Count
    queues: Annotated[list[Word], Meta(max_length=1_000)]
    slots: Count
    """The number of tasks that the process runs at once."""
    names: Word
    """The digest of the task names that the process can run."""
    generation: str
    started_at: Annotated[float, Meta(ge=0, lt=1e11)]
    held: bytes = b""
    """The attempts that the process holds and whose reports are not yet known to be applied, 16 + 4 bytes each."""
    running: Count = 0
    doubtful: bool = False
    """The process was suspended or cut off. It starts nothing new, and asks which of its attempts are still current."""
    burst: bool = False
    """The process asks for the order to drain as soon as its queues are empty."""
    draining: bool = False
    number: int = 0
    """Grows with each heartbeat, so that an old heartbeat that has not expired is not mistaken for a new one."""
    hungry: bool = False
    """All slots are busy, and the worker could start more processes. It asks whether its queues hold ready tasks."""
    still: Annotated[float, Meta(ge=0, lt=1e9)] = 0.0
    """Seconds for which the process has been stalled (unresponsive), if too long; else 0."""
    executions: Count = 0
    """The number of executions that the process can watch at once, in addition to its slots."""
    executing: Count = 0
    """The number of executions that the process watches now."""
    parent: Id | None = None
    """The id of the parent process, used in orders to drain because process ids are reused. None from older
    releases."""
    memory: _Bytes = 0
    """The resident memory of the process in bytes; 0 if unknown."""
    parent_memory: _Bytes = 0
    """The resident memory of the parent process in bytes; 0 if unknown."""
    release: Annotated[str, Meta(max_length=100, pattern=r"^[^\x00]*$")] = ""
    """The release of the application, if set."""
    parameters: Annotated[str, Meta(max_length=100, pattern=r"^[^\x00]*$")] = ""
    """The digest under which the parameters of the process's tasks are published for a while."""


class Order(msgspec.Struct, frozen=True, array_like=True):
    """Orders of the leader to one worker."""

    stop: list[Attempt] = []
    """Attempts that are no longer current. The worker stops them and reports nothing about them."""
    drain: bool = False
    go_on: bool = False
    """The leader has checked the doubtful worker's attempts. Those not in `stop` are current."""
    work_waits: bool = False
    """The answer to a hungry worker: its queues hold more tasks than the fleet has slots for."""
    moved: list[Attempt] = []
    """The attempts in `stop` whose task continues in another attempt. Another worker now watches their executions."""
    end: bool = False
    """The whole worker (this process and its siblings) drains and exits, as with SIGTERM."""
    spare: list[Attempt] = []
    """Attempts to return if they still wait for a slot here, because other workers with their tasks have free slots."""


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """The end of a task or run, as published to waiting clients."""

    id: Id
    state: _EndState
    result: bytes | None = None
    """The encoded result if it is small; None means that the client reads it from Postgres."""
    error: TaskError | None = None


class Applied(msgspec.Struct, frozen=True, array_like=True):
    """The leader has applied the events of `generation` up to `cursor` to Postgres."""

    generation: Word
    cursor: _Position


class ProgressMark(msgspec.Struct, frozen=True, array_like=True):
    """The last progress that a running task reported."""

    attempt: int
    fraction: float
    text: str = ""


class LogLine(msgspec.Struct, frozen=True, array_like=True):
    """A log line of a running task."""

    at: float
    """The time of the line in seconds since 1970, by the worker's clock."""
    attempt: int
    level: str
    text: str
    source: str = ""
    """`stdout`, `stderr` or the name of a logger; empty for lines logged through the task context or by an executor."""


class LogChunk(msgspec.Struct, frozen=True, array_like=True):
    """Log lines of one attempt, sent to be stored."""

    task: Id
    attempt: AttemptNumber
    part: int
    """The number of the chunk within the attempt, from 0."""
    run: Id | None
    step: str
    """The step of the workflow that the task runs, or the task's name."""
    lines: bytes
    """The encoded lines. Their texts may be encrypted; the leader stores them unread."""


class TaskChange(msgspec.Struct, frozen=True, array_like=True):
    """A change of a task's state, for live events."""

    id: Id
    queue: Word
    name: Word
    status: Word
    attempt: AttemptNumber
    run: Id | None


class RunChange(msgspec.Struct, frozen=True, array_like=True):
    """The start, end or other change of a run, for live events."""

    id: Id
    status: str = ""
    """The new state; empty if the state is unchanged."""
    workflow: str | None = None


class WorkerChange(msgspec.Struct, frozen=True, array_like=True):
    """A worker that joined, left or is about to leave, for live events."""

    id: Word
    state: Word
    """`live`, `draining`, `still` or `gone`."""


class Changes(msgspec.Struct, frozen=True, array_like=True):
    """The changes of one commit of the leader, for live events."""

    generation: Word
    is_first: bool = False
    """Earlier changes were not published. Listeners read the current state again."""
    tasks: list[TaskChange] = []
    """Oldest first."""
    runs: list[RunChange] = []
    workers: list[WorkerChange] = []
    queues: bool = False
    """Whether a queue was paused, resumed or limited."""


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}

encode = _encoder.encode


def prepare(*kinds: Any) -> None:
    """Create the decoders of these message types.

    Call this while a module is imported. msgspec caches what it derives from a type on the type itself, and the cache
    is incomplete while it is built: another thread that decodes at that moment crashes the process.
    """
    for kind in kinds:
        _decoders[kind] = msgspec.msgpack.Decoder(kind)


def decode(kind: type[M], data: bytes) -> M:
    """Decode one message of a type that was passed to `prepare`."""
    if len(data) > MAX_MESSAGE:
        raise Malformed(f"{kind} expected: {len(data):,} bytes are too large for a message")
    try:
        return _decoders[kind].decode(data)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"{kind} expected: {error}") from error


def decode_or_none(kind: type[M], data: bytes | None) -> M | None:
    """Decode a message that may be absent. A foreign message, or one of another release, counts as absent."""
    if data is None:
        return None
    try:
        return decode(kind, data)
    except Malformed:
        return None


prepare(Flush, list[Dispatch], Dispatch, Activation, list[Event], Heartbeat, Order, Applied, list[Ended], KeyHolder)
prepare(
    Attempt,
    list[Word],
    ProgressMark,
    LogLine,
    list[LogLine],
    tuple[str, LogLine],
    list[LogChunk],
    list[NewTask],
    list[Id],
    dict[bytes, KeyHolder],
    list[EndReport],
    tuple[str, bytes],
    int,
    Changes,
)


def encode_flush(flush: Flush) -> bytes:
    """Encode the reports of one worker flush. Raise Malformed if no reader would take them."""
    data = encode(flush)
    if len(data) > MAX_MESSAGE:
        raise Malformed(f"{len(data):,} bytes are too large for a message, which has at most {MAX_MESSAGE:,}")
    return data


def decode_flush(data: bytes) -> Flush:
    """Decode the reports of one worker flush."""
    return decode(Flush, data)


def decode_dispatches(data: bytes) -> list[Dispatch]:
    """Decode one dispatch message into its tasks."""
    return decode(list[Dispatch], data)


ATTEMPT_SIZE = 20


def pack_attempt(identifier: bytes, attempt: int) -> bytes:
    """Encode an attempt as the 20 bytes that heartbeats use."""
    return identifier + attempt.to_bytes(4, "big")


def unpack_attempts(data: bytes) -> list[tuple[bytes, int]]:
    return [
        (data[start : start + 16], int.from_bytes(data[start + 16 : start + 20], "big"))
        for start in range(0, len(data) - ATTEMPT_SIZE + 1, ATTEMPT_SIZE)
    ]


@lru_cache(maxsize=16)
def digest_of(body: bytes) -> str:
    """Return the digest under which a worker publishes the parameters of its tasks."""
    return hashlib.blake2b(body, digest_size=8).hexdigest()


def names_digest(names: list[str]) -> str:
    """Return the digest under which a worker publishes the task names that it knows."""
    return hashlib.blake2b("\n".join(sorted(names)).encode(), digest_size=8).hexdigest()


def stream_position(entry_id: str) -> tuple[int, int]:
    """Return a stream entry's id as a pair of numbers that compare in stream order."""
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or 0)
