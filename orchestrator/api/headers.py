"""Headers: those that make every answer safe, those that no request may repeat, and conditions (RFC 9110, 13)."""

from __future__ import annotations

import re

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Scope, Send

from orchestrator.api.problems import MEDIA_TYPE, Problem, refused
from orchestrator.domain.dag.definition import ANY, Condition

_SAFE = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)
_KEPT_NOWHERE = (b"cache-control", b"no-store")
_ASKED_AGAIN = (b"cache-control", b"private, no-cache")
_ALWAYS_TLS = (b"strict-transport-security", b"max-age=31536000")
_PART = 1_000_000
"""Bytes of an answer that are sent at once."""


def safely(send: Send, scope: Scope) -> Send:
    """Return what sends an answer with these headers, beside those that it has."""

    async def send_safely(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = message["headers"]
            names = {name.lower() for name, _ in given}
            added = [pair for pair in _SAFE if pair[0] not in names]
            if b"cache-control" not in names:  # an answer with an ETag may be kept, and is revalidated each time
                added.append(_ASKED_AGAIN if b"etag" in names else _KEPT_NOWHERE)
            if scope["scheme"] == "https":
                added.append(_ALWAYS_TLS)
            message["headers"] = [*given, *added]
        body = message.get("body", b"")
        if len(body) > _PART:  # so that the event loop serves others in between
            for start in range(0, len(body) - _PART, _PART):
                await send({"type": message["type"], "body": body[start : start + _PART], "more_body": True})
            message["body"] = body[-(len(body) % _PART or _PART) :]
        await send(message)

    return send_safely


_LONGEST_ADDRESS = 16_000
"""Bytes."""
_AMBIGUOUS = "The request is ambiguous"
_ONCE = ((b"authorization", "Authorization"), (b"idempotency-key", "Idempotency-Key"))
"""Headers that two readers could take differently where they are given twice."""


def fault(scope: Scope) -> Response | None:
    """Return what to answer where an address is too long, or a head says something twice.

    A proxy in front may have believed the other.
    """
    if len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"]) > _LONGEST_ADDRESS:
        return _refusal(414, "The address is too long", f"Path and query have at most {_LONGEST_ADDRESS:,} bytes.")
    names = [name for name, _ in scope["headers"]]
    if b"content-length" in names and b"transfer-encoding" in names:
        return _refusal(400, _AMBIGUOUS, "It has both Content-Length and Transfer-Encoding: send one of them.")
    for name, shown in _ONCE:
        if names.count(name) > 1:
            return _refusal(400, _AMBIGUOUS, f"It has the header {shown} more than once: send one of them.")
    return None


def _refusal(status: int, title: str, detail: str) -> Response:
    data = msgspec.json.encode(Problem(title=title, status=status, detail=detail))
    return Response(data, status, headers={"Connection": "close"}, media_type=MEDIA_TYPE)


_TAG = r'(W/)?"([\x21\x23-\x7e\x80-\xff]*)"'
_LIST = re.compile(rf"\s*{_TAG}\s*(?:,\s*{_TAG}\s*)*")


def is_known(tag: str, given: str | None) -> bool:
    if given is None:
        return False
    return given.strip() == ANY or tag.strip('"') in (found for _, found in re.findall(_TAG, given))


def condition_of(headers: Headers) -> Condition:
    """Return what must be true of what is to be replaced; a weak tag in If-Match is like no other (RFC 9110, 8.8.3)."""
    return Condition(one_of=_tags(headers, "If-Match", weak=False), none_of=_tags(headers, "If-None-Match", weak=True))


def _tags(headers: Headers, name: str, *, weak: bool) -> frozenset[str] | None:
    lines = headers.getlist(name)
    if not lines:
        return None
    given = ", ".join(lines)
    if given.strip() == ANY:
        return frozenset([ANY])
    if not _LIST.fullmatch(given):
        raise refused(
            400,
            "The condition cannot be understood",
            f'{name}: expected tags as an ETag has them, such as "0a1b2c", by comma, or *; found {given!r:.100}.',
        )
    return frozenset(tag for is_weak, tag in re.findall(_TAG, given) if weak or not is_weak)
