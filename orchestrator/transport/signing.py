"""Signatures on messages: a program that can only write to Redis can neither command workers nor report for them.

A message is signed for its key or channel, whose name has the namespace, the generation, the queue or the worker in it:
elsewhere it is invalid. A signed message begins with a byte that no MessagePack begins with, so a process without keys
reads it too, and does not check it.
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

_MARK = b"\xc1\x01"
"""The first byte is the one that MessagePack never uses; the second is the version of what follows."""
_ID, _MAC, _STAMP = 4, 16, 8
_HEAD = len(_MARK) + _ID + _MAC + _STAMP
_ADVICE = "Make one with: orchestrator keys generate-signing"
_SAY_EVERY = 10.0
"""Seconds between two lines about refused messages, however many there are."""


class Forged(Malformed):
    """A message that is not signed, or not by one of us, or not for the place where it stands."""


class Checked(NamedTuple):
    """A message that is what its writer wrote."""

    body: bytes
    stamp: int
    """The number or time that it was signed with beside its key, or 0."""
    mac: bytes
    """The signature; empty if there was none to check."""


class Signing:
    """No signatures are made, and those of others are not checked."""

    refused = 0
    """Messages that this process did not believe."""
    is_on = False

    def sign(self, place: str, body: bytes, stamp: int = 0) -> bytes:  # noqa: ARG002
        """Return a message as it may stand in a place."""
        return body

    def check(self, place: str, data: bytes) -> Checked:  # noqa: ARG002
        """Return the message that stands in a place, or raise `Forged`."""
        return Checked(data[_HEAD:] if data[:2] == _MARK else data, 0, b"")

    def body(self, place: str, data: bytes) -> bytes:  # noqa: ARG002
        """Return what the message that stands in a place says, or raise `Forged`."""
        return data[_HEAD:] if data[:2] == _MARK else data

    def believed(self, place: str, data: bytes) -> bytes:
        """Return what the message that stands in a place says; nothing if it is not ours."""
        try:
            return self.body(place, data)
        except Forged:
            return b""

    def read(self, kind: type[M], place: str, data: bytes | None) -> M | None:
        """Return the message that stands in a place, or None if it is nothing of ours."""
        return None if data is None else decode_or_none(kind, self.believed(place, data))


OFF = Signing()


class Signatures(Signing):
    """Signs with the first key, and believes all of them."""

    is_on = True

    def __init__(self, secrets: Sequence[bytes], *, required: bool) -> None:
        keys = [blake2b(secret, digest_size=32, person=b"messages").digest() for secret in secrets]
        self._keys = {_key_id(key): key for key in keys}
        self._first = _key_id(keys[0])
        self._required = required
        self._lock = threading.Lock()
        self._unsaid = 0
        self._say_at = 0.0

    def sign(self, place: str, body: bytes, stamp: int = 0) -> bytes:
        number = stamp.to_bytes(_STAMP, "big")
        return b"".join((_MARK, self._first, _mac(self._keys[self._first], place, number, body), number, body))

    def check(self, place: str, data: bytes) -> Checked:
        """Return the message that stands in a place, or raise `Forged`."""
        if data[:2] != _MARK:
            if self._required:
                raise self._forged(place, "it is not signed, and the setting signing asks for signatures")
            return Checked(data, 0, b"")
        key = self._keys.get(data[2:6])
        if key is None:
            raise self._forged(place, f"it is signed with key {data[2:6].hex()}, which is not among signing_keys")
        mac, number, body = data[6:22], data[22:_HEAD], data[_HEAD:]
        if not hmac.compare_digest(mac, _mac(key, place, number, body)):
            raise self._forged(place, "its signature does not fit: it was altered, or made for another place")
        return Checked(body, int.from_bytes(number, "big"), mac)

    def body(self, place: str, data: bytes) -> bytes:
        """Return what the message that stands in a place says, or raise `Forged`."""
        return self.check(place, data).body

    def _forged(self, place: str, why: str) -> Forged:
        """Count a refusal, log it now and then, and return it."""
        with self._lock:
            self.refused += 1
            self._unsaid += 1
            if (now := time.monotonic()) >= self._say_at:
                log.error("message.refused messages=%d last=%s reason=%s", self._unsaid, place, why)
                self._say_at, self._unsaid = now + _SAY_EVERY, 0
        return Forged(f"refused: {why}")


class Once:
    """The signatures of messages that were taken lately: none is taken twice."""

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def take(self, mac: bytes) -> None:
        """Remember a message, or raise `Forged` if it has been taken before; unsigned ones are not remembered."""
        if not mac:
            return
        if mac in self._seen:
            raise Forged("refused: it has been received before, and stands there again")
        self._seen[mac] = None
        if len(self._seen) > self._most:
            self._seen.popitem(last=False)


def signing_of(settings: Settings) -> Signing:
    """Return how the settings want messages to be signed."""
    name = "signing_keys"
    texts = read_secrets(name, settings.signing_keys, settings.signing_keys_file, _ADVICE)
    if not texts:
        return OFF
    return Signatures([decode_secret(name, text, _ADVICE) for text in texts], required=settings.signing == "require")


def _key_id(key: bytes) -> bytes:
    return blake2b(key, digest_size=_ID, person=b"signing key id").digest()


def _mac(key: bytes, place: str, number: bytes, body: bytes) -> bytes:
    where = place.encode()
    digest = blake2b(b"%d:%b" % (len(where), where), digest_size=_MAC, key=key)
    digest.update(number)
    digest.update(body)
    return digest.digest()
