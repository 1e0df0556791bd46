"""What running tasks say of themselves: progress and log lines, for people who watch.

Nothing depends on it. It is written by workers, capped, expires, and is given up before it could fill Redis, which has
more important things to carry; the scheduler and Postgres never see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar, cast

import msgspec
from redis import Redis
from redis.exceptions import RedisError

from orchestrator.sealing import is_sealed_text, reveal_text
from orchestrator.transport.codec import LogLine, Malformed, ProgressMark, decode, encode
from orchestrator.transport.keys import JOURNAL_TTL, LOG_CAP, SPOKEN_CAP, Keys

W = TypeVar("W", ProgressMark, LogLine)

LOSSES = (RedisError, OSError)
"""Whatever goes wrong with Redis, a key that a stranger has taken included: some words are lost, and that is all."""

_FULL = 0.8
"""Share of Redis's memory from which on nothing more is said."""


def is_full(redis: Redis) -> bool:
    """Say whether Redis is short of memory."""
    memory = redis.info("memory")
    limit = int(memory.get("maxmemory", 0))
    return limit > 0 and int(memory["used_memory"]) > _FULL * limit


def write(
    redis: Redis, keys: Keys, marks: Mapping[bytes, ProgressMark], lines: Sequence[tuple[bytes, LogLine]]
) -> None:
    """Write down, by task, how far it has come and what it said."""
    pipeline = redis.pipeline(transaction=False)
    for task, mark in marks.items():
        place = keys.progress(task)
        pipeline.set(place, keys.signing.sign(place, encode(_sealed(keys, mark))), ex=JOURNAL_TTL)
    for task, line in lines:
        place = keys.log(task)
        body = keys.signing.sign(place, encode(_sealed(keys, line)))
        pipeline.xadd(place, {"d": body}, maxlen=LOG_CAP, approximate=False)
    for task in {task for task, _ in lines}:
        pipeline.expire(keys.log(task), JOURNAL_TTL)
    tasks = {*marks, *(task for task, _ in lines)}
    spoken = keys.signing.sign(keys.spoken, encode(list(tasks)))
    pipeline.xadd(keys.spoken, {"d": spoken}, maxlen=SPOKEN_CAP, approximate=True)
    pipeline.execute()


def _sealed(keys: Keys, said: W) -> W:
    """Return what a task says with its text sealed."""
    return said if keys.vault is None else msgspec.structs.replace(said, text=keys.vault.seal_text(said.text))


def _opened(said: W) -> W:
    """Return what a task said with its text opened where this process can."""
    return msgspec.structs.replace(said, text=reveal_text(said.text)) if is_sealed_text(said.text) else said


def read_progress(redis: Redis, keys: Keys, task: bytes) -> tuple[ProgressMark, float] | None:
    """Return how far a task last said it had come and the seconds since then, or None if it has said nothing."""
    pipeline = redis.pipeline(transaction=True)
    pipeline.get(keys.progress(task))
    pipeline.pttl(keys.progress(task))
    value, left = pipeline.execute()
    if value is None:
        return None
    try:
        mark = _opened(decode(ProgressMark, keys.signing.body(keys.progress(task), value)))
        return mark, max(0.0, JOURNAL_TTL - left / 1000)  # by one clock, that of Redis
    except Malformed:
        return None  # another release's, or a stranger's


class Said(NamedTuple):
    """A line, and its place in the log."""

    entry: str
    line: LogLine


class Heard(NamedTuple):
    """What a task has said of itself since it was last listened to."""

    mark: ProgressMark | None
    lines: list[Said]


def read_many(redis: Redis, keys: Keys, after: Mapping[bytes, str]) -> dict[bytes, Heard]:
    """Return how far tasks have come, and what each said after an entry of its log."""
    pipeline = redis.pipeline(transaction=False)
    for task, entry in after.items():
        pipeline.get(keys.progress(task))
        pipeline.xrange(keys.log(task), min=f"({entry}")
    answers = pipeline.execute(raise_on_error=False)
    heard: dict[bytes, Heard] = {}
    for number, task in enumerate(after):
        mark, lines = answers[2 * number : 2 * number + 2]
        heard[task] = Heard(_mark(keys, task, mark), _said(keys, task, lines) if isinstance(lines, list) else [])
    return heard


def _mark(keys: Keys, task: bytes, value: object) -> ProgressMark | None:
    if not isinstance(value, bytes):
        return None
    try:
        return _opened(decode(ProgressMark, keys.signing.body(keys.progress(task), value)))
    except Malformed:
        return None  # another release's


def _said(keys: Keys, task: bytes, items: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> list[Said]:
    said: list[Said] = []
    for entry, fields in items:
        try:
            body = keys.signing.body(keys.log(task), (fields or {}).get(b"d", b""))
            said.append(Said(entry.decode(), _opened(decode(LogLine, body))))
        except Malformed:
            continue  # another release's, or a stranger's
    return said


def read_log(redis: Redis, keys: Keys, task: bytes, after: str = "0-0", block: float = 0.0) -> list[Said]:
    """Return what a task said after an entry; wait up to `block` seconds for it."""
    wait = max(1, int(block * 1000)) if block > 0 else None
    reply = redis.xread({keys.log(task): after}, block=wait)
    streams = cast("list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]", reply or [])
    return [said for _, items in streams for said in _said(keys, task, items)]
