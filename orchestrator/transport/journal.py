"""Progress and log lines of running tasks.

Nothing depends on them. Workers write a limited amount, and drop lines before they could fill Redis. Progress stays in
Redis and expires. Lines wait in one stream until the leader has stored them; if too many wait, workers drop more lines.
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
"""All errors of Redis, including a key overwritten by another program. Some lines are lost; nothing else fails."""

_FULL = 0.8
"""The share of Redis's memory limit above which workers write no progress or lines."""
_ENTRY_BYTES = 64_000
"""Bytes of lines in one stream entry, after which another entry begins."""


def is_full(redis: Redis) -> bool:
    """Return whether Redis is short of memory."""
    memory = redis.info("memory")
    limit = int(memory.get("maxmemory", 0))
    return limit > 0 and int(memory["used_memory"]) > _FULL * limit


# -- progress


def write(redis: Redis, keys: Keys, marks: Mapping[bytes, ProgressMark]) -> None:
    """Store the progress of tasks, by task id."""
    pipeline = redis.pipeline(transaction=False)
    for task, mark in marks.items():
        key = keys.progress(task)
        pipeline.set(key, keys.signing.sign(key, encode(_sealed(keys, mark))), ex=JOURNAL_TTL)
    spoken = keys.signing.sign(keys.spoken, encode(list(marks)))
    pipeline.xadd(keys.spoken, {"d": spoken}, maxlen=SPOKEN_CAP, approximate=True)
    pipeline.execute()


def _sealed(keys: Keys, mark: ProgressMark) -> ProgressMark:
    return mark if keys.vault is None else msgspec.structs.replace(mark, text=keys.vault.seal_text(mark.text))


def _opened(mark: ProgressMark) -> ProgressMark:
    """Decrypt the text of a progress report if this process has the key."""
    return msgspec.structs.replace(mark, text=reveal_text(mark.text)) if is_sealed_text(mark.text) else mark


def read_progress(redis: Redis, keys: Keys, task: bytes) -> tuple[ProgressMark, float] | None:
    """Return a task's last progress and the seconds since then, or None if the task reported no progress."""
    pipeline = redis.pipeline(transaction=True)
    pipeline.get(keys.progress(task))
    pipeline.pttl(keys.progress(task))
    value, remaining = pipeline.execute()
    mark = _mark(keys, task, value)
    return None if mark is None else (mark, max(0.0, JOURNAL_TTL - remaining / 1000))  # by Redis's clock alone


def read_all_progress(redis: Redis, keys: Keys, tasks: Sequence[bytes]) -> dict[bytes, ProgressMark | None]:
    """Return the last progress of each task."""
    values = cast("list[bytes | None]", redis.mget([keys.progress(task) for task in tasks])) if tasks else []
    return {task: _mark(keys, task, value) for task, value in zip(tasks, values, strict=True)}


def _mark(keys: Keys, task: bytes, value: object) -> ProgressMark | None:
    if not isinstance(value, bytes):
        return None
    try:
        return _opened(decode(ProgressMark, keys.signing.body(keys.progress(task), value)))
    except Malformed:
        return None  # of another release, or foreign


# -- lines


def send_lines(redis: Redis, keys: Keys, chunks: Sequence[LogChunk]) -> int:
    """Append chunks of lines to the stream that the leader stores. Return how many of the first chunks fitted."""
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
    """The ids of the stream entries."""
    chunks: list[LogChunk]


def waiting_lines(redis: Redis, keys: Keys, most: int, block: float) -> Waiting:
    """Return the oldest unstored lines. Wait up to `block` seconds for the first."""
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
                continue  # of another release, or foreign
    return Waiting(entries, chunks)


def drop_lines(redis: Redis, keys: Keys, waiting: Waiting, shared: Redis | None = None) -> None:
    """Delete stored lines, and publish which tasks and runs have logged, on the server shared by all shards."""
    redis.xdel(keys.logs, *waiting.entries)
    spoken = {chunk.task for chunk in waiting.chunks} | {chunk.run for chunk in waiting.chunks if chunk.run}
    if spoken:
        body = keys.signing.sign(keys.spoken, encode(list(spoken)))
        (shared or redis).xadd(keys.spoken, {"d": body}, maxlen=SPOKEN_CAP, approximate=True)
