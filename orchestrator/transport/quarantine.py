"""Messages that could not be understood or applied: set aside for people to look at, so that nothing waits for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple, cast

from redis import Redis
from redis.client import Pipeline

from orchestrator.transport.codec import stream_position
from orchestrator.transport.keys import Keys

CAP = 1_000
"""Messages that are kept; of more, the oldest go."""
_BODY = 10_000
_ERROR = 2_000
"""Bytes and characters of each that are kept: a flood of huge messages must not fill Redis."""


class Refused(NamedTuple):
    """A message that is to be set aside."""

    source: str
    """Where it stood: the id of an event, `queue/id` of a dispatch message, the name of a key."""
    body: bytes
    error: str


@dataclass(frozen=True, kw_only=True)
class SetAside:
    """A message that was set aside."""

    id: str
    """Its id in the quarantine."""
    at: datetime
    """When it was set aside."""
    source: str
    """Where it stood."""
    error: str
    """Why it was refused."""
    size: int
    """How many bytes it had."""
    body: bytes
    """The first of them."""


def set_aside(pipeline: Pipeline, keys: Keys, refused: Iterable[Refused]) -> None:
    """Keep messages, in a pipeline that the caller executes."""
    for source, body, error in refused:
        fields = {"entry": source, "body": body[:_BODY], "size": len(body), "error": error[:_ERROR]}
        pipeline.xadd(keys.quarantine, fields, maxlen=CAP, approximate=True)  # type: ignore[arg-type]


def keep_aside(redis: Redis, keys: Keys, refused: Iterable[Refused]) -> None:
    """Keep messages, at once."""
    pipeline = redis.pipeline(transaction=False)
    set_aside(pipeline, keys, refused)
    pipeline.execute()


def newest(redis: Redis, keys: Keys, limit: int) -> list[SetAside]:
    """Return the messages that were set aside last, newest first."""
    return [_view(*entry) for entry in cast("list[_Entry]", redis.xrevrange(keys.quarantine, count=limit))]


def find(redis: Redis, keys: Keys, entry: str) -> SetAside | None:
    found = cast("list[_Entry]", redis.xrange(keys.quarantine, entry, entry))
    return _view(*found[0]) if found else None


def clear(redis: Redis, keys: Keys) -> int:
    """Drop all of them; return how many there were."""
    count: int = redis.xlen(keys.quarantine)
    redis.xtrim(keys.quarantine, maxlen=0, approximate=False)
    return count


_Entry = tuple[bytes, dict[bytes, bytes]]


def _view(entry: bytes, fields: dict[bytes, bytes]) -> SetAside:
    def text(name: bytes) -> str:
        return fields.get(name, b"").decode(errors="replace")

    body = fields.get(b"body", b"")
    milliseconds = min(stream_position(entry.decode())[0], 253_402_300_799_000)
    return SetAside(
        id=entry.decode(),
        at=datetime.fromtimestamp(milliseconds / 1000, UTC),
        source=text(b"entry"),
        error=text(b"error"),
        size=int(text(b"size")) if text(b"size").isdecimal() else len(body),
        body=body,
    )
