"""Sealing: values encrypted with AES-256-GCM, so that a copy of Postgres or Redis reveals none of them.

A sealed value is a MessagePack extension, so it can take the place of any value, and the scheduler can copy it without
decrypting it. In columns of text and JSON it is a text that starts with `sealed:`.

    kind (1 byte), length of the key's id (1), the id, nonce (12), ciphertext and tag

Kind and namespace are authenticated: the arguments of a task cannot be decrypted as a result, and nothing can be
decrypted in another namespace, because the key is derived from the namespace. Keys are looked up by id.
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
"""The code of the MessagePack extension."""
CALL, VALUE = b"c", b"v"
"""The kinds of values: the arguments of a call, and everything else."""
_TEXT = "sealed:"
_PLAIN = "plain"
"""As the first entry of the keys: do not seal values, but decrypt with the other keys."""
_NONCE = 12
_KEY_ID = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_ADVICE = "Make one with: orchestrator keys generate-data"

_ciphers: dict[str, dict[bytes, Any]] = {}
"""The ciphers of this process by key id. Different namespaces or applications may use the same id."""


class Sealed(PayloadError):
    """A value cannot be decrypted: the key is missing, or the value was altered."""

    def __init__(self, message: str, key: str = "", *, is_missing: bool = False) -> None:
        super().__init__(message)
        self.key = key
        """The id of the data key that sealed it."""
        self.is_missing = is_missing
        """This process lacks the key. Otherwise the value was altered or comes from another namespace."""


class Vault:
    """Seals values with the first of the data keys."""

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
        """Return a keyed digest, which only holders of the key can compare with known data."""
        return blake2b(data, key=self._first, digest_size=8).digest()

    def seal(self, kind: bytes, data: bytes) -> bytes:
        """Return encoded data, sealed. Sealed values and references stay as they are."""
        return data if is_sealed(data) or is_reference(data) else msgspec.msgpack.encode(self._extension(kind, data))

    def _extension(self, kind: bytes, data: bytes) -> Ext:
        id = self.key.encode()
        head = kind + bytes([len(id)]) + id
        nonce = os.urandom(_NONCE)
        return Ext(CODE, b"".join((head, nonce, self._cipher.encrypt(nonce, data, head))))

    def opened(self, kind: bytes, data: bytes) -> bytes:
        """Return encoded data, decrypted if it is sealed."""
        return open_data(data, kind)

    def other_keys(self) -> list[str]:
        """Return the ids of keys that only decrypt."""
        return [id for id in _ciphers if id != self.key]

    def seal_text(self, text: str) -> str:
        """Return a text, sealed as a text. An empty text stays empty."""
        if not text or is_sealed_text(text):
            return text
        return _TEXT + base64.b64encode(self.seal(VALUE, msgspec.msgpack.encode(text))).decode()

    def seal_value_text(self, plain: Any) -> str:
        """Return plain data, sealed as a text. Empty if the data cannot be encoded."""
        try:
            return _TEXT + base64.b64encode(self.seal(VALUE, msgspec.msgpack.encode(plain))).decode()
        except (TypeError, ValueError, OverflowError, RecursionError):
            return ""

    def seal_json(self, text: str) -> str:
        """Return a JSON text, sealed as a JSON string."""
        return f'"{self.seal_text(text)}"' if text and not is_sealed_text(text[1:-1]) else text


def vault_of(settings: Settings) -> Vault | None:
    """Return the vault for the settings, or None if they seal nothing. From now on, this process has their keys."""
    if not settings.data_keys and not settings.data_keys_file:
        return None
    return _vault(settings.root, settings.data_keys, settings.data_keys_file)


@lru_cache(maxsize=100)
def _vault(namespace: str, text: str, path: str) -> Vault | None:
    name = "data_keys"
    keys: dict[str, bytes] = {}
    parts = read_secrets(name, text, path, _ADVICE)
    for part in parts[parts[:1] == [_PLAIN] :]:
        id, colon, secret = part.partition(":")
        if not colon or id in keys:
            raise ConfigurationError(
                f"Setting {name}: expected id:secret pairs separated by commas, the active one first, and each id "
                f"once. {_ADVICE}"
            )
        check_key_id(id)
        keys[id] = decode_secret(name, secret, _ADVICE)
    vault = Vault(namespace, keys) if keys else None
    return None if parts[:1] == [_PLAIN] else vault


def check_key_id(id: str) -> str:
    """Return the id of a key, or raise ConfigurationError if it is invalid."""
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
    """Return the announcements of all data keys of this process. Empty if `settings` have none."""
    vault_of(settings)
    has_keys = settings.data_keys or settings.data_keys_file
    return [key_name(id) for id in sorted(_ciphers)] if has_keys else []


_KEY_NAME = "@data-key:"


def key_name(id: str) -> str:
    """Return the announcement of a data key, among the names of a worker's tasks."""
    return _KEY_NAME + id


def key_of_name(name: str) -> str | None:
    """Return the data key in an announced name, or None if the name is something else."""
    return name[len(_KEY_NAME) :] if name.startswith(_KEY_NAME) else None


# -- decrypting with the keys of this process


def is_sealed(data: bytes) -> bool:
    """Return whether encoded data is sealed as a whole."""
    head = _SIZES.get(data[:1])
    return head is not None and data[head - 1 : head] == bytes([CODE])


_SIZES = {b"\xc7": 3, b"\xc8": 4, b"\xc9": 6}
"""By first byte, the length of an extension's header. The last byte of the header is the code."""


def key_of(data: bytes) -> str:
    """Return the id of the key that sealed the data of an extension."""
    return data[2 : 2 + data[1]].decode("ascii", "replace") if len(data) > 1 else ""


def can_open(data: bytes) -> bool:
    """Return whether this process has a key with the id that sealed the data of an extension."""
    return key_of(data) in _ciphers


def open_extension(data: bytes, kind: bytes) -> bytes:
    """Decrypt the data of an extension, or raise Sealed."""
    id = key_of(data)
    ciphers = _ciphers.get(id)
    if ciphers is None:
        known = ", ".join(_ciphers) or "none"
        raise Sealed(
            f"A value is sealed with data key {id!r:.40}, but this process has {known}. See the setting data_keys.",
            id,
            is_missing=_KEY_ID.fullmatch(id) is not None,
        )
    length = 2 + data[1]
    head, nonce, body = data[:length], data[length : length + _NONCE], data[length + _NONCE :]
    if head[:1] == kind:
        for cipher in ciphers.values():
            try:
                return bytes(cipher.decrypt(nonce, body, head))
            except Exception as error:  # wrong tag: the type of the error depends on the library
                if type(error).__name__ != "InvalidTag" and not isinstance(error, ValueError):
                    raise
    raise Sealed(
        f"A value that is sealed with data key {id!r} cannot be decrypted: it was changed, belongs to a different "
        f"place, or the id names a different key here.",
        id,
    )


def open_data(data: bytes, kind: bytes) -> bytes:
    """Return encoded data, decrypted if it is sealed as a whole."""
    return open_extension(extension_of(data), kind) if is_sealed(data) else data


@overload
def reveal(data: bytes, kind: bytes = VALUE) -> bytes: ...
@overload
def reveal(data: bytes | None, kind: bytes = VALUE) -> bytes | None: ...
def reveal(data: bytes | None, kind: bytes = VALUE) -> bytes | None:
    """Return encoded data, decrypted if this process can. Clients over HTTP may have no keys."""
    try:
        return data and open_data(data, kind)
    except Sealed:
        return data


def open_text(text: str) -> str:
    """Return a text, decrypted if it is sealed. If that is impossible, return a note with the id of its key."""
    revealed = reveal_text(text)
    return described(extension_of(as_data(revealed))) if is_sealed_text(revealed) else revealed


def reveal_text(text: str) -> str:
    """Return a text, decrypted if this process can. The rest stays sealed for an HTTP client that has the key."""
    if not is_sealed_text(text):
        return text
    try:
        return _content_text(msgspec.msgpack.decode(open_data(as_data(text), VALUE)))
    except (Sealed, ValueError):
        return text


def _content_text(plain: Any) -> str:
    """Return the content of a sealed text: a text, or data as JSON."""
    return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()


def described(data: bytes) -> str:
    """Return a note that replaces a sealed value and names its key."""
    id = key_of(data)
    return f"(sealed with key {id})" if _KEY_ID.fullmatch(id) else "(sealed)"


_IN_TEXT = re.compile(r"sealed:[A-Za-z0-9+/]+={0,2}")
_IN_JSON = re.compile(rb"sealed:[A-Za-z0-9+/]+={0,2}")
_MARK = _TEXT.encode()


def legible(text: str) -> str:
    """Return a text for display, with sealed texts in it decrypted or replaced by notes."""
    return _IN_TEXT.sub(lambda match: open_text(match[0]), text) if _TEXT in text else text


def reveal_json(data: bytes) -> bytes:
    """Return JSON from a server, with sealed texts decrypted if this process can.

    Only clients may do this: a server that decrypts whatever it is sent would decrypt it for anybody.
    """
    return _IN_JSON.sub(lambda match: _as_json(reveal_text(match[0].decode())), data) if _MARK in data else data


def describe_json(data: bytes) -> bytes:
    """Return JSON with sealed texts replaced by notes."""

    def describe(match: re.Match[bytes]) -> bytes:
        text = match[0].decode()
        return _as_json(described(extension_of(as_data(text)))) if is_sealed_text(text) else match[0]

    return _IN_JSON.sub(describe, data) if _MARK in data else data


def _as_json(text: str) -> bytes:
    return msgspec.json.encode(text)[1:-1]


def extension_of(data: bytes) -> bytes:
    """Return the data of an encoded extension."""
    return data[_SIZES[data[:1]] :]


def as_text(data: bytes) -> str:
    """Return a sealed value as a sealed text."""
    return _TEXT + base64.b64encode(data).decode()


def as_data(text: str) -> bytes:
    """Return a sealed text as a sealed MessagePack value."""
    return base64.b64decode(text.removeprefix(_TEXT))


def is_sealed_text(text: str) -> bool:
    """Return whether a text is sealed, and not merely starts with the prefix."""
    if not text.startswith(_TEXT):
        return False
    try:
        return is_sealed(base64.b64decode(text[len(_TEXT) :], validate=True))
    except (binascii.Error, ValueError):
        return False


def open_json(plain: Any) -> Any:
    """Return decoded JSON, decrypted if it is sealed. If that is impossible, return it as a sealed extension."""
    if not isinstance(plain, str) or not is_sealed_text(plain):
        return plain
    inner = extension_of(as_data(plain))
    try:
        return msgspec.json.decode(str(msgspec.msgpack.decode(open_extension(inner, VALUE))))
    except Sealed:
        return Ext(CODE, inner)
