"""Messages as bytes, and back. A message that does not decode raises `Malformed`, and the reader quarantines it.

Anyone with access to Redis can write there. So each message declares what its fields may hold, within the limits of
Postgres and memory, and everything beyond is malformed: the code after this module relies on it. Reports are the
exception. They are checked one by one when they are applied, so that a bad one does not affect others.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from orchestrator.domain.code.activation import Activated, Activation
from orchestrator.domain.code.history import Event
from orchestrator.domain.plain import whole
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

LARGEST_MESSAGE = 128_000_000
"""Bytes; what is larger is not decoded. The largest payload that settings allow fits several times."""

Word = Annotated[str, Meta(min_length=1, max_length=300, pattern=r"^[^\x00]*$")]
"""A name of something: short, and without the one character that Postgres refuses."""
Count = Annotated[int, Meta(ge=0, lt=2**31)]
_Bytes = Annotated[int, Meta(ge=0, lt=2**60)]
_Position = Annotated[str, Meta(pattern=whole("[0-9]{1,20}-[0-9]{1,20}"))]
_EndState = Annotated[str, Meta(pattern=whole("|".join(sorted({*ENDED_TASK_STATES, *ENDED_RUN_STATES}))))]


EndReport = Succeeded | Failed | Returned | Activated
"""The report of a child process about the one attempt that it ran."""
LARGEST_BUNDLE = 50
"""Most tasks in one dispatch message."""


class Malformed(ValueError):
    """Bytes that are not the message they should be."""


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    id: Id
    attempt: AttemptNumber


class Heartbeat(msgspec.Struct, frozen=True, array_like=True):
    """A heartbeat: the state of a worker process, written every second by its parent."""

    worker: Word
    host: Word
    pid: Count
    queues: Annotated[list[Word], Meta(max_length=1_000)]
    slots: Count
    """How many tasks it runs at once."""
    names: Word
    """Digest of the task names that it knows."""
    generation: str
    started_at: Annotated[float, Meta(ge=0, lt=1e11)]
    held: bytes = b""
    """Attempts that it has and whose reports are not yet known to be applied: 16 + 4 bytes each."""
    running: Count = 0
    doubtful: bool = False
    """It was stopped or cut off, starts nothing new, and asks which of its attempts are still current."""
    burst: bool = False
    """It wants the order to drain when its queues are empty."""
    draining: bool = False
    number: int = 0
    """Grows with every beat, so that one that merely has not expired yet is not taken for a new one."""
    hungry: bool = False
    """All its slots are busy, and it could have more: it wants to know whether work waits."""
    still: Annotated[float, Meta(ge=0, lt=1e9)] = 0.0
    """Seconds for which its process has done nothing, if that is too long."""
    executions: Count = 0
    """How many executions it watches at once, beside what it runs in its slots."""
    executing: Count = 0
    """How many it watches now."""
    parent: Id | None = None
    """The id of the parent process, which orders to drain name: a later one of the same host and process id is another.
    None from releases that take no such orders."""
    memory: _Bytes = 0
    """Bytes of memory that its process has in RAM; 0 if that is not known."""
    parent_memory: _Bytes = 0
    """The same of its parent process."""
    release: Annotated[str, Meta(max_length=100, pattern=r"^[^\x00]*$")] = ""
    """The release of the application, if it has a name."""
    parameters: Annotated[str, Meta(max_length=100, pattern=r"^[^\x00]*$")] = ""
    """Digest of the parameters of its tasks, under which they are published for a while."""


class Order(msgspec.Struct, frozen=True, array_like=True):
    """The leader's orders to one worker."""

    stop: list[Attempt] = []
    """Attempts that are no longer current: stop them, and report nothing of them."""
    drain: bool = False
    go_on: bool = False
    """The doubtful worker's attempts were checked; those not in `stop` are current."""
    work_waits: bool = False
    """The answer to a hungry worker: its queues hold more than the fleet can take."""
    moved: list[Attempt] = []
    """Of those to stop, the ones whose task goes on in another attempt: executions that are others' to watch now."""
    end: bool = False
    """The whole worker is to drain and end, this process and its neighbours, as with SIGTERM."""
    spare: list[Attempt] = []
    """Attempts that wait for a slot here, while others that know them have some: give them back if they still wait."""


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """The end of a task or run, as published to waiting clients."""

    id: Id
    state: _EndState
    result: bytes | None = None
    """The encoded result where it is small; None means: read it from Postgres."""
    error: TaskError | None = None


class Applied(msgspec.Struct, frozen=True, array_like=True):
    """Events up to `cursor` of `generation` are in Postgres."""

    generation: Word
    cursor: _Position


class ProgressMark(msgspec.Struct, frozen=True, array_like=True):
    """How far a running task says it has come."""

    attempt: int
    fraction: float
    text: str = ""


class LogLine(msgspec.Struct, frozen=True, array_like=True):
    """Something that a running task said."""

    at: float
    """Seconds since 1970, by the worker's clock."""
    attempt: int
    level: str
    text: str
    source: str = ""
    """`stdout`, `stderr` or the name of a logger; nothing for what was said through a context, or by an executor."""


class LogChunk(msgspec.Struct, frozen=True, array_like=True):
    """Some lines of one attempt, on their way to where they are kept."""

    task: Id
    attempt: AttemptNumber
    part: int
    """Counts those of the attempt, from 0."""
    run: Id | None
    step: str
    """The step that the task is of, or its name."""
    lines: bytes
    """The encoded lines, whose texts may be sealed: they are passed on unread."""


class TaskChange(msgspec.Struct, frozen=True, array_like=True):
    """A task that has changed its state, for live events."""

    id: Id
    queue: Word
    name: Word
    status: Word
    attempt: AttemptNumber
    run: Id | None


class RunChange(msgspec.Struct, frozen=True, array_like=True):
    """A run that has begun or ended, or of which something else has changed."""

    id: Id
    status: str = ""
    """Its new state; empty if that is the old one."""
    workflow: str | None = None


class WorkerChange(msgspec.Struct, frozen=True, array_like=True):
    """A worker that has come, gone, or is about to."""

    id: Word
    state: Word
    """`live`, `draining`, `still` or `gone`."""


class Changes(msgspec.Struct, frozen=True, array_like=True):
    """The changes of one commit of the leader, for live events."""

    generation: Word
    is_first: bool = False
    """Changes before it were not published: listeners read the current state again."""
    tasks: list[TaskChange] = []
    """In the order in which they happened."""
    runs: list[RunChange] = []
    workers: list[WorkerChange] = []
    queues: bool = False
    """A queue was paused, resumed or limited."""


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}

encode = _encoder.encode


def prepare(*kinds: Any) -> None:
    """Get ready to decode messages of these kinds.

    To be called while a module is imported. What msgspec works out of a type is kept with the type, unfinished while it
    is worked out: a thread that uses it at that moment takes the whole process down.
    """
    for kind in kinds:
        _decoders[kind] = msgspec.msgpack.Decoder(kind)


def decode(kind: type[M], data: bytes) -> M:
    """Decode one message of the given kind, which has been prepared."""
    if len(data) > LARGEST_MESSAGE:
        raise Malformed(f"{kind} expected: {len(data):,} bytes are more than any message has")
    try:
        return _decoders[kind].decode(data)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"{kind} expected: {error}") from error


def decode_or_none(kind: type[M], data: bytes | None) -> M | None:
    """Decode a message that may be absent. One that is not ours, or of another release, counts as absent."""
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


def decode_flush(data: bytes) -> Flush:
    """Decode the reports of one worker flush."""
    return decode(Flush, data)


def decode_dispatches(data: bytes) -> list[Dispatch]:
    """Decode one dispatch message: the tasks that travel in it."""
    return decode(list[Dispatch], data)


ATTEMPT_SIZE = 20


def pack_attempt(identifier: bytes, attempt: int) -> bytes:
    """Return an attempt in the fixed-size form that heartbeats use."""
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


def stream_position(entry: str) -> tuple[int, int]:
    """Return a stream entry's id as numbers that compare in stream order."""
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence or 0)
