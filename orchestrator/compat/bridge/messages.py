"""Reads messages of Celery's protocol, as kombu writes them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from celery.app.task import Context
from kombu.compression import decompress
from kombu.exceptions import ContentDisallowed, SerializationError
from kombu.serialization import loads as load_body
from kombu.utils.json import loads

from orchestrator.compat.bridge.calls import Unreadable

_ACCEPTED = {"application/json", "application/x-msgpack"}
_OWN_HEADERS = {"lang", "task", "id", "shadow", "eta", "expires", "group", "root_id", "parent_id", "argsrepr"} | {
    *("kwargsrepr", "origin", "compression")
}
"""String headers that Celery itself sets."""


def read_envelope(message: bytes) -> Mapping[str, Any]:
    """Decode a message with its headers. Raise Unreadable if kombu did not write it."""
    try:
        envelope = loads(message)
        headers, properties = envelope["headers"], envelope["properties"]
        if isinstance(headers, dict) and isinstance(properties, dict) and isinstance(envelope["body"], str):
            if not isinstance(headers.get("task"), str):
                raise Unreadable("it has no task in its headers, as in the first version of Celery's protocol")
            return envelope  # type: ignore[no-any-return]
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise Unreadable("it is not a message of kombu")


def read_body(envelope: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Return a call's arguments, its keywords, and its embedded callbacks, chain and chord."""
    kind = envelope.get("content-type")
    if kind not in _ACCEPTED:
        raise Unreadable(f"its content type is {kind}; the bridge reads JSON and msgpack, but not pickle")
    try:
        body: Any = envelope["body"]
        if envelope["properties"].get("body_encoding") == "base64":
            body = base64.b64decode(body)
        if compression := envelope["headers"].get("compression"):
            body = decompress(body, compression)
        arguments, keywords, embedded = load_body(body, kind, envelope.get("content-encoding"), accept=_ACCEPTED)
    except (ContentDisallowed, SerializationError, KeyError, ValueError, TypeError, binascii.Error, OSError) as error:
        raise Unreadable(f"its body cannot be read: {error}") from None
    if not (isinstance(arguments, list) and isinstance(keywords, dict) and isinstance(embedded, dict)):
        raise Unreadable("its body is not a list of arguments, keywords and callbacks")
    return arguments, keywords, embedded


def read_options(envelope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the execution options of a message as task options."""
    headers, options = envelope["headers"], dict[str, Any]()
    eta, expires = _parse_time(headers.get("eta")), _parse_time(headers.get("expires"))
    if eta is not None and eta > datetime.now(UTC):
        options["eta"] = eta
    if expires is not None:
        options["expires"] = expires
    hard, soft = [*(headers.get("timelimit") or ()), None, None][:2]
    if hard:
        options["timeout"] = hard
    if soft and not (hard and soft >= hard):
        options["soft_timeout"] = soft
    if priority := envelope["properties"].get("priority"):
        options["priority"] = max(-100, -priority)  # on Redis, Celery runs priority 0 first
    own = {name: value for name, value in headers.items() if name not in _OWN_HEADERS and isinstance(value, str)}
    if own:
        options["headers"] = own
    return options


def _parse_time(text: Any) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text) if text else None
    except (ValueError, TypeError):
        raise Unreadable(f"its time {text!r} cannot be read") from None
    return moment if moment is None or moment.tzinfo else moment.replace(tzinfo=UTC)


def read_request(message: bytes) -> Context:
    """Return a message as Celery's request context."""
    envelope = read_envelope(message)
    arguments, keywords, embedded = read_body(envelope)
    delivery = envelope["properties"].get("delivery_info") or {}
    return Context(envelope["headers"], args=arguments, kwargs=keywords, delivery_info=delivery, **embedded)
