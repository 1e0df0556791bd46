"""The quarantine keeps messages that could not be decoded or applied for inspection, so that nothing waits for them."""

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
"""The maximum number of quarantined messages; the oldest are dropped."""
_MAX_BODY = 10_000
_MAX_ERROR = 2_000
"""Bytes of body and characters of error to keep of each message: a flood of huge messages must not fill Redis."""


class Refused(NamedTuple):
    """A message to quarantine."""

    source: str
    """The origin of the message: the id of an event, `queue/id` of a dispatch message, or the name of a key."""
    body: bytes
    error: str


@dataclass(frozen=True, kw_only=True)
class SetAside:
    """A quarantined message."""

    id: str
    """The id in the quarantine."""
    at: datetime
    """The time at which the message was quarantined."""
    source: str
    """The origin of the message."""
    error: str
    """The reason for the refusal."""
    size: int
    """The size of the message in bytes."""
    body: bytes
    """The first bytes of the message."""


def set_aside(pipeline: Pipeline, keys: Keys, refused: Iterable[Refused]) -> None:
    """Quarantine messages in a pipeline that the caller executes."""
    for source, body, error in refused:
        fields = {"entry": source, "body": body[:_MAX_BODY], "size": len(body), "error": error[:_MAX_ERROR]}
        pipeline.xadd(keys.quarantine, fields, maxlen=CAP, approximate=True)  # type: ignore[arg-type]


def set_aside_now(redis: Redis, keys: Keys, refused: Iterable[Refused]) -> None:
    """Quarantine messages immediately."""
    pipeline = redis.pipeline(transaction=False)
    set_aside(pipeline, keys, refused)
    pipeline.execute()


def newest(redis: Redis, keys: Keys, limit: int) -> list[SetAside]:
    """Return the last quarantined messages, newest first."""
    return [_view(*entry) for entry in cast("list[_Entry]", redis.xrevrange(keys.quarantine, count=limit))]


def find(redis: Redis, keys: Keys, entry: str) -> SetAside | None:
    entries = cast("list[_Entry]", redis.xrange(keys.quarantine, entry, entry))
    return _view(*entries[0]) if entries else None


def clear(redis: Redis, keys: Keys) -> int:
    """Delete all quarantined messages; return their number."""
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
