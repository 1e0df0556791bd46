"""Messages of Celery's protocol, as kombu writes them."""

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
"""Texts among the headers that Celery itself has put there."""


def read_envelope(message: bytes) -> Mapping[str, Any]:
    """Return a message with its headers, or refuse what is none."""
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
    """Return a call's arguments, its keywords, and what else it has: callbacks, chain and chord."""
    kind = envelope.get("content-type")
    if kind not in _ACCEPTED:
        raise Unreadable(f"its content type is {kind}; the bridge reads JSON and msgpack, and no pickle")
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
    """Return what a message says about how its task runs, as options of ours."""
    headers, options = envelope["headers"], dict[str, Any]()
    eta, expires = _moment(headers.get("eta")), _moment(headers.get("expires"))
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
        options["priority"] = max(-100, -priority)  # on Redis, Celery's 0 goes first
    own = {name: value for name, value in headers.items() if name not in _OWN_HEADERS and isinstance(value, str)}
    if own:
        options["headers"] = own
    return options


def _moment(text: Any) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text) if text else None
    except (ValueError, TypeError):
        raise Unreadable(f"its time {text!r} cannot be read") from None
    return moment if moment is None or moment.tzinfo else moment.replace(tzinfo=UTC)


def read_request(message: bytes) -> Context:
    """Return a message as Celery's code knows the task that it runs."""
    envelope = read_envelope(message)
    arguments, keywords, embedded = read_body(envelope)
    delivery = envelope["properties"].get("delivery_info") or {}
    return Context(envelope["headers"], args=arguments, kwargs=keywords, delivery_info=delivery, **embedded)
