"""Signatures of messages. A program without a key that can write to Redis can neither command workers nor report
results.

A signature covers the name of the message's Redis key or channel, which includes the namespace and the generation,
queue or worker. Under another name the message is invalid. A signed message begins with a byte that MessagePack never
uses: a process without signing keys recognizes the header, skips it, and reads the message unchecked.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple, TypeVar

from orchestrator.secret_keys import decode_secret, read_secrets
from orchestrator.settings import Settings
from orchestrator.telemetry import get_logger
from orchestrator.transport.codec import Malformed, decode_or_none

log = get_logger("signing")
M = TypeVar("M")

_PREFIX = b"\xc1\x01"
"""The first byte never occurs in MessagePack; the second is the version of the format."""
_ID, _MAC, _STAMP = 4, 16, 8
_HEAD = len(_PREFIX) + _ID + _MAC + _STAMP
_ADVICE = "Make one with: orchestrator keys generate-signing"
_LOG_INTERVAL = 10.0
"""Seconds between two log lines about refused messages, regardless of their number."""


class Forged(Malformed):
    """A message without a valid signature of ours for its key or channel."""


class Checked(NamedTuple):
    """A verified message."""

    body: bytes
    stamp: int
    """The number or time that was signed with the message, or 0."""
    mac: bytes
    """The signature; empty if none was checked."""


class Signing:
    """Signing is off: messages are written without signatures, and existing signatures are not checked."""

    refused = 0
    """The number of messages that this process refused."""
    is_on = False

    def sign(self, name: str, body: bytes, stamp: int = 0) -> bytes:  # noqa: ARG002
        """Return the signed message for a Redis key or channel."""
        return body

    def check(self, name: str, data: bytes) -> Checked:  # noqa: ARG002
        """Verify a message read from a Redis key or channel. Raise `Forged` if that fails."""
        return Checked(data[_HEAD:] if data[:2] == _PREFIX else data, 0, b"")

    def body(self, name: str, data: bytes) -> bytes:  # noqa: ARG002
        """Verify a message and return its body."""
        return data[_HEAD:] if data[:2] == _PREFIX else data

    def body_or_empty(self, name: str, data: bytes) -> bytes:
        """Verify a message and return its body; empty bytes if it is forged."""
        try:
            return self.body(name, data)
        except Forged:
            return b""

    def read(self, kind: type[M], name: str, data: bytes | None) -> M | None:
        """Verify and decode a message. Return None if it is missing, forged or malformed."""
        return None if data is None else decode_or_none(kind, self.body_or_empty(name, data))


OFF = Signing()


class Signatures(Signing):
    """Signs with the first key; accepts signatures by any key."""

    is_on = True

    def __init__(self, secrets: Sequence[bytes], *, required: bool) -> None:
        keys = [blake2b(secret, digest_size=32, person=b"messages").digest() for secret in secrets]
        self._keys = {_key_id(key): key for key in keys}
        self._first_id = _key_id(keys[0])
        self._required = required
        self._lock = threading.Lock()
        self._unlogged = 0
        self._log_at = 0.0

    def sign(self, name: str, body: bytes, stamp: int = 0) -> bytes:
        number = stamp.to_bytes(_STAMP, "big")
        return b"".join((_PREFIX, self._first_id, _mac(self._keys[self._first_id], name, number, body), number, body))

    def check(self, name: str, data: bytes) -> Checked:
        """Verify a message read from a Redis key or channel. Raise `Forged` if that fails."""
        if data[:2] != _PREFIX:
            if self._required:
                raise self._forged(name, "it is not signed, but the setting signing requires signatures")
            return Checked(data, 0, b"")
        key = self._keys.get(data[2:6])
        if key is None:
            raise self._forged(name, f"it is signed with key {data[2:6].hex()}, which is not among signing_keys")
        mac, number, body = data[6:22], data[22:_HEAD], data[_HEAD:]
        if not hmac.compare_digest(mac, _mac(key, name, number, body)):
            raise self._forged(name, "its signature is invalid: it was changed, or signed for a different place")
        return Checked(body, int.from_bytes(number, "big"), mac)

    def body(self, name: str, data: bytes) -> bytes:
        """Verify a message and return its body."""
        return self.check(name, data).body

    def _forged(self, name: str, reason: str) -> Forged:
        """Count a refusal, log it at most every `_LOG_INTERVAL` seconds, and return the exception."""
        with self._lock:
            self.refused += 1
            self._unlogged += 1
            if (now := time.monotonic()) >= self._log_at:
                log.error("message.refused messages=%d last=%s reason=%s", self._unlogged, name, reason)
                self._log_at, self._unlogged = now + _LOG_INTERVAL, 0
        return Forged(f"refused: {reason}")


class ReplayGuard:
    """Remembers the signatures of recent messages, to refuse replays."""

    def __init__(self, max_size: int = 10_000) -> None:
        self._max_size = max_size
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def take(self, mac: bytes) -> None:
        """Remember a message; raise `Forged` if it was received before. Unsigned messages are not remembered."""
        if not mac:
            return
        if mac in self._seen:
            raise Forged("refused: it was received before, and has been added again")
        self._seen[mac] = None
        if len(self._seen) > self._max_size:
            self._seen.popitem(last=False)


def signing_of(settings: Settings) -> Signing:
    """Return the signing that the settings ask for."""
    name = "signing_keys"
    texts = read_secrets(name, settings.signing_keys, settings.signing_keys_file, _ADVICE)
    if not texts:
        return OFF
    return Signatures([decode_secret(name, text, _ADVICE) for text in texts], required=settings.signing == "require")


def _key_id(key: bytes) -> bytes:
    return blake2b(key, digest_size=_ID, person=b"signing key id").digest()


def _mac(key: bytes, name: str, number: bytes, body: bytes) -> bytes:
    encoded = name.encode()
    digest = blake2b(b"%d:%b" % (len(encoded), encoded), digest_size=_MAC, key=key)
    digest.update(number)
    digest.update(body)
    return digest.digest()
