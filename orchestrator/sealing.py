"""Values sealed with AES-256-GCM: a copy of Postgres or Redis reveals none of them.

A sealed value is an extension of MessagePack, so it stands wherever a value stands, and the scheduler copies it into
others without opening it. In columns of text and JSON it is a text that begins with `sealed:`.

    kind (1 byte), length of the key's id (1), the id, nonce (12), ciphertext and tag

The kind, and the namespace, from which the key is derived, are bound: the arguments of a task open as no result, and
nothing opens in another namespace. What this process can open is known by the ids of its keys.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from functools import lru_cache
from hashlib import blake2b
from typing import Any, overload

import msgspec
from msgspec.msgpack import Ext

from orchestrator.errors import ConfigurationError, PayloadError
from orchestrator.references import is_reference
from orchestrator.secret_keys import decode_secret, read_secrets
from orchestrator.settings import Settings

CODE = 2
"""Of the extension."""
CALL, VALUE = b"c", b"v"
"""The kinds: the arguments of a call, and any other value or text."""
_TEXT = "sealed:"
_PLAIN = "plain"
"""In the first place of the keys, it says that nothing is sealed, and the others open."""
_NONCE = 12
_KEY_ID = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_ADVICE = "Make one with: orchestrator keys generate-data"

_ciphers: dict[str, dict[bytes, Any]] = {}
"""By the ids of keys, the ciphers of this process: several where namespaces or applications have the same id."""


class Sealed(PayloadError):
    """A value cannot be opened: its key is not here, or it was altered."""

    def __init__(self, message: str, key: str = "", *, is_missing: bool = False) -> None:
        super().__init__(message)
        self.key = key
        """The id of the data key that has sealed it."""
        self.is_missing = is_missing
        """This process lacks that key; otherwise the value was altered, or is of another place."""


class Vault:
    """Seals with the first of the data keys."""

    def __init__(self, namespace: str, keys: dict[str, bytes]) -> None:
        for id, secret in keys.items():
            key = blake2b(namespace.encode(), key=secret[:64], digest_size=32, person=b"data").digest()
            _ciphers.setdefault(id, {}).setdefault(key, _cipher(key))
        self.key = next(iter(keys))
        """The id of the key in use."""
        first = blake2b(namespace.encode(), key=keys[self.key][:64], digest_size=32, person=b"data").digest()
        self._cipher = _ciphers[self.key][first]
        self._first = first

    def digest(self, data: bytes) -> bytes:
        """Return a digest by which only a holder of the key can recognise the data."""
        return blake2b(data, key=self._first, digest_size=8).digest()

    def seal(self, kind: bytes, data: bytes) -> bytes:
        """Return encoded data, sealed; what is sealed already, or stored elsewhere, stays as it is."""
        return data if is_sealed(data) or is_reference(data) else msgspec.msgpack.encode(self._extension(kind, data))

    def _extension(self, kind: bytes, data: bytes) -> Ext:
        id = self.key.encode()
        head = kind + bytes([len(id)]) + id
        nonce = os.urandom(_NONCE)
        return Ext(CODE, b"".join((head, nonce, self._cipher.encrypt(nonce, data, head))))

    def opened(self, kind: bytes, data: bytes) -> bytes:
        """Return encoded data, opened if it is sealed."""
        return open_data(data, kind)

    def other_keys(self) -> list[str]:
        """Return the ids of the keys that open, and seal no more."""
        return [id for id in _ciphers if id != self.key]

    def seal_text(self, text: str) -> str:
        """Return a text, sealed as a text; an empty one says nothing, and stays as it is."""
        if not text or is_sealed_text(text):
            return text
        return _TEXT + base64.b64encode(self.seal(VALUE, msgspec.msgpack.encode(text))).decode()

    def seal_value_text(self, plain: Any) -> str:
        """Return plain data, sealed as a text; what no message can carry is nothing."""
        try:
            return _TEXT + base64.b64encode(self.seal(VALUE, msgspec.msgpack.encode(plain))).decode()
        except (TypeError, ValueError, OverflowError, RecursionError):
            return ""

    def seal_json(self, text: str) -> str:
        """Return JSON, sealed as JSON: the text of a text."""
        return f'"{self.seal_text(text)}"' if text and not is_sealed_text(text[1:-1]) else text


def vault_of(settings: Settings) -> Vault | None:
    """Return what seals by these settings; None where nothing is sealed. What they can open, this process can."""
    if not settings.data_keys and not settings.data_keys_file:
        return None
    return _vault(settings.root, settings.data_keys, settings.data_keys_file)


@lru_cache(maxsize=100)
def _vault(namespace: str, given: str, path: str) -> Vault | None:
    name = "data_keys"
    keys: dict[str, bytes] = {}
    parts = read_secrets(name, given, path, _ADVICE)
    for part in parts[parts[:1] == [_PLAIN] :]:
        id, colon, secret = part.partition(":")
        if not colon or id in keys:
            raise ConfigurationError(
                f"Setting {name}: expected id:secret, by comma, the one in use first, and each id once. {_ADVICE}"
            )
        check_key_id(id)
        keys[id] = decode_secret(name, secret, _ADVICE)
    vault = Vault(namespace, keys) if keys else None
    return None if parts[:1] == [_PLAIN] else vault


def check_key_id(id: str) -> str:
    """Return the id of a key, or say why it is none."""
    if not _KEY_ID.fullmatch(id):
        raise ConfigurationError(
            f"The id of a data key: expected up to 32 letters, digits, _, . and -, found one of {len(id)} characters."
        )
    return id


def _cipher(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise ConfigurationError(
            "Setting data_keys: sealing needs the package cryptography. Install it: pip install "
            "'durable-orchestrator[crypto]'"
        ) from error
    return AESGCM(key)


def key_names(settings: Settings) -> list[str]:
    """Return how a worker says which data keys it has: what others can open, it may have to hand back."""
    vault_of(settings)
    has_keys = settings.data_keys or settings.data_keys_file
    return [key_name(id) for id in sorted(_ciphers)] if has_keys else []


_KEY_NAME = "@data-key:"


def key_name(id: str) -> str:
    """Return what a worker that has a data key knows, besides its tasks."""
    return _KEY_NAME + id


def key_of_name(name: str) -> str | None:
    """Return the data key that a worker says that it has; None if it speaks of a task."""
    return name[len(_KEY_NAME) :] if name.startswith(_KEY_NAME) else None


# -- opening, with whatever keys this process has


def is_sealed(data: bytes) -> bool:
    """Say whether encoded data is sealed as a whole."""
    head = _SIZES.get(data[:1])
    return head is not None and data[head - 1 : head] == bytes([CODE])


_SIZES = {b"\xc7": 3, b"\xc8": 4, b"\xc9": 6}
"""By its first byte, the length of what stands before the data of an extension; it ends with the code."""


def key_of(data: bytes) -> str:
    """Return the id of the key with which the data of an extension is sealed."""
    return data[2 : 2 + data[1]].decode("ascii", "replace") if len(data) > 1 else ""


def can_open(data: bytes) -> bool:
    """Say whether this process has a key of the id with which the data of an extension is sealed."""
    return key_of(data) in _ciphers


def open_extension(data: bytes, kind: bytes) -> bytes:
    """Return what the data of an extension holds, or say why it cannot be opened."""
    id = key_of(data)
    ciphers = _ciphers.get(id)
    if ciphers is None:
        known = ", ".join(_ciphers) or "none"
        raise Sealed(
            f"A value is sealed with data key {id!r:.40}, and this process has {known}. See the setting data_keys.",
            id,
            is_missing=_KEY_ID.fullmatch(id) is not None,
        )
    length = 2 + data[1]
    head, nonce, body = data[:length], data[length : length + _NONCE], data[length + _NONCE :]
    if head[:1] == kind:
        for cipher in ciphers.values():
            try:
                return bytes(cipher.decrypt(nonce, body, head))
            except Exception as error:  # whatever a library calls it that a tag does not fit
                if type(error).__name__ != "InvalidTag" and not isinstance(error, ValueError):
                    raise
    raise Sealed(
        f"A value that is sealed with data key {id!r} cannot be opened: it was altered, or is of another place, or "
        f"another key has that id here.",
        id,
    )


def open_data(data: bytes, kind: bytes) -> bytes:
    """Return encoded data, opened if it is sealed as a whole."""
    return open_extension(extension_of(data), kind) if is_sealed(data) else data


@overload
def reveal(data: bytes, kind: bytes = VALUE) -> bytes: ...
@overload
def reveal(data: bytes | None, kind: bytes = VALUE) -> bytes | None: ...
def reveal(data: bytes | None, kind: bytes = VALUE) -> bytes | None:
    """Return encoded data, opened where this process can: a client over HTTP may have no keys."""
    try:
        return data and open_data(data, kind)
    except Sealed:
        return data


def open_text(text: str) -> str:
    """Return a text, opened if it is sealed; in the place of one that cannot be, with which key it is."""
    revealed = reveal_text(text)
    return described(extension_of(as_data(revealed))) if is_sealed_text(revealed) else revealed


def reveal_text(text: str) -> str:
    """Return a text, opened where this process can: a client over HTTP may have the key."""
    if not is_sealed_text(text):
        return text
    try:
        return _told(msgspec.msgpack.decode(open_data(as_data(text), VALUE)))
    except (Sealed, ValueError):
        return text


def _told(plain: Any) -> str:
    """Return what was sealed as a text: a text, or data as JSON."""
    return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()


def described(data: bytes) -> str:
    """Say of the data of an extension, in the place of its value, with which key it is sealed."""
    id = key_of(data)
    return f"(sealed with key {id})" if _KEY_ID.fullmatch(id) else "(sealed)"


_IN_TEXT = re.compile(r"sealed:[A-Za-z0-9+/]+={0,2}")
_IN_JSON = re.compile(rb"sealed:[A-Za-z0-9+/]+={0,2}")
_MARK = _TEXT.encode()


def legible(text: str) -> str:
    """Return a text for people, in which each sealed one is opened, or replaced by a note."""
    return _IN_TEXT.sub(lambda found: open_text(found[0]), text) if _TEXT in text else text


def reveal_json(data: bytes) -> bytes:
    """Return JSON that a server has sent, in which each sealed text is opened where this process can.

    Only clients do so, for themselves: a server that opened whatever it is sent would open it for anybody.
    """
    return _IN_JSON.sub(lambda found: _as_json(reveal_text(found[0].decode())), data) if _MARK in data else data


def describe_json(data: bytes) -> bytes:
    """Return JSON in which a note replaces each sealed text."""

    def describe(found: re.Match[bytes]) -> bytes:
        text = found[0].decode()
        return _as_json(described(extension_of(as_data(text)))) if is_sealed_text(text) else found[0]

    return _IN_JSON.sub(describe, data) if _MARK in data else data


def _as_json(text: str) -> bytes:
    return msgspec.json.encode(text)[1:-1]


def extension_of(data: bytes) -> bytes:
    """Return the data of the extension that encoded data is."""
    return data[_SIZES[data[:1]] :]


def as_text(data: bytes) -> str:
    """Return a sealed value as a text, sealed as before."""
    return _TEXT + base64.b64encode(data).decode()


def as_data(text: str) -> bytes:
    """Return a sealed text as a value of MessagePack, sealed as before."""
    return base64.b64decode(text.removeprefix(_TEXT))


def is_sealed_text(text: str) -> bool:
    """Say whether a text is sealed, and does not only begin so."""
    if not text.startswith(_TEXT):
        return False
    try:
        return is_sealed(base64.b64decode(text[len(_TEXT) :], validate=True))
    except (binascii.Error, ValueError):
        return False


def open_json(plain: Any) -> Any:
    """Return decoded JSON, opened if it is sealed; where it cannot be, it stays a sealed value."""
    if not isinstance(plain, str) or not is_sealed_text(plain):
        return plain
    inner = extension_of(as_data(plain))
    try:
        return msgspec.json.decode(str(msgspec.msgpack.decode(open_extension(inner, VALUE))))
    except Sealed:
        return Ext(CODE, inner)
