"""Progress and log lines of running tasks.

Nothing depends on it. Workers write it, capped, and drop it before it could fill Redis. Progress stays here, and
expires. Lines stand in one stream until the leader has stored them; while too many wait there, no more are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import msgspec
from redis import Redis
from redis.exceptions import RedisError

from orchestrator.sealing import is_sealed_text, reveal_text
from orchestrator.transport.codec import LogChunk, Malformed, ProgressMark, decode, encode
from orchestrator.transport.keys import JOURNAL_TTL, LOGS_CAP, SPOKEN_CAP, Keys

LOSSES = (RedisError, OSError)
"""All errors of Redis, including a key that another program has taken: some lines are lost, and that is all."""

_FULL = 0.8
"""Share of Redis's memory from which on nothing more is said."""
_ENTRY_BYTES = 64_000
"""Bytes of lines from which on they go into another entry."""


def is_full(redis: Redis) -> bool:
    """Say whether Redis is short of memory."""
    memory = redis.info("memory")
    limit = int(memory.get("maxmemory", 0))
    return limit > 0 and int(memory["used_memory"]) > _FULL * limit


# -- progress


def write(redis: Redis, keys: Keys, marks: Mapping[bytes, ProgressMark]) -> None:
    """Write down, by task, how far it has come."""
    pipeline = redis.pipeline(transaction=False)
    for task, mark in marks.items():
        place = keys.progress(task)
        pipeline.set(place, keys.signing.sign(place, encode(_sealed(keys, mark))), ex=JOURNAL_TTL)
    spoken = keys.signing.sign(keys.spoken, encode(list(marks)))
    pipeline.xadd(keys.spoken, {"d": spoken}, maxlen=SPOKEN_CAP, approximate=True)
    pipeline.execute()


def _sealed(keys: Keys, said: ProgressMark) -> ProgressMark:
    """Return what a task says with its text sealed."""
    return said if keys.vault is None else msgspec.structs.replace(said, text=keys.vault.seal_text(said.text))


def _opened(said: ProgressMark) -> ProgressMark:
    """Return what a task said with its text opened where this process can."""
    return msgspec.structs.replace(said, text=reveal_text(said.text)) if is_sealed_text(said.text) else said


def read_progress(redis: Redis, keys: Keys, task: bytes) -> tuple[ProgressMark, float] | None:
    """Return how far a task last said it had come and the seconds since then, or None if it has said nothing."""
    pipeline = redis.pipeline(transaction=True)
    pipeline.get(keys.progress(task))
    pipeline.pttl(keys.progress(task))
    value, left = pipeline.execute()
    mark = _mark(keys, task, value)
    return None if mark is None else (mark, max(0.0, JOURNAL_TTL - left / 1000))  # by one clock, that of Redis


def read_marks(redis: Redis, keys: Keys, tasks: Sequence[bytes]) -> dict[bytes, ProgressMark | None]:
    """Return how far tasks have come."""
    values = cast("list[bytes | None]", redis.mget([keys.progress(task) for task in tasks])) if tasks else []
    return {task: _mark(keys, task, value) for task, value in zip(tasks, values, strict=True)}


def _mark(keys: Keys, task: bytes, value: object) -> ProgressMark | None:
    if not isinstance(value, bytes):
        return None
    try:
        return _opened(decode(ProgressMark, keys.signing.body(keys.progress(task), value)))
    except Malformed:
        return None  # of another release, or not ours


# -- lines


def send_lines(redis: Redis, keys: Keys, chunks: Sequence[LogChunk]) -> int:
    """Pass lines on to be stored; return how many of the chunks, from the first on, there was room for."""
    entries = _entries(chunks)
    room = max(0, LOGS_CAP - int(redis.xlen(keys.logs)))
    pipeline = redis.pipeline(transaction=False)
    for entry in entries[:room]:
        body = keys.signing.sign(keys.logs, encode(entry))
        pipeline.xadd(keys.logs, {"d": body}, maxlen=2 * LOGS_CAP, approximate=True)
    pipeline.execute()
    return sum(map(len, entries[:room]))


def _entries(chunks: Iterable[LogChunk]) -> list[list[LogChunk]]:
    entries: list[list[LogChunk]] = []
    size = _ENTRY_BYTES
    for chunk in chunks:
        if size >= _ENTRY_BYTES:
            entries.append([])
            size = 0
        entries[-1].append(chunk)
        size += len(chunk.lines)
    return entries


class Waiting(NamedTuple):
    """Lines that are not stored yet."""

    entries: list[bytes]
    """Where they stand."""
    chunks: list[LogChunk]


def waiting_lines(redis: Redis, keys: Keys, most: int, block: float) -> Waiting:
    """Return the oldest entries that are not stored; wait so many seconds for the first."""
    reply = redis.xread({keys.logs: "0-0"}, count=most, block=max(1, int(block * 1000)))
    streams = cast("list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]", reply or [])
    entries: list[bytes] = []
    chunks: list[LogChunk] = []
    for _, items in streams:
        for entry, fields in items:
            entries.append(entry)
            try:
                chunks += decode(list[LogChunk], keys.signing.body(keys.logs, (fields or {}).get(b"d", b"")))
            except Malformed:
                continue  # of another release, or not ours
    return Waiting(entries, chunks)


def drop_lines(redis: Redis, keys: Keys, waiting: Waiting, shared: Redis | None = None) -> None:
    """Delete stored lines, and publish which tasks and runs have logged, where the keys of all shards are."""
    redis.xdel(keys.logs, *waiting.entries)
    spoken = {chunk.task for chunk in waiting.chunks} | {chunk.run for chunk in waiting.chunks if chunk.run}
    if spoken:
        body = keys.signing.sign(keys.spoken, encode(list(spoken)))
        (shared or redis).xadd(keys.spoken, {"d": body}, maxlen=SPOKEN_CAP, approximate=True)
