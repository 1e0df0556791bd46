"""HTTP headers: security headers of every response, headers that must not repeat, and conditions (RFC 9110, 13)."""

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
_NOT_CACHED = (b"cache-control", b"no-store")
_REVALIDATED = (b"cache-control", b"private, no-cache")
_ALWAYS_TLS = (b"strict-transport-security", b"max-age=31536000")
_CHUNK = 1_000_000
"""Bytes of a response that are sent at once."""


def with_safe_headers(send: Send, scope: Scope) -> Send:
    """Wrap `send` to add security headers that a response lacks, and to split large bodies."""

    async def send_safely(message: Message) -> None:
        if message["type"] == "http.response.start":
            existing = message["headers"]
            names = {name.lower() for name, _ in existing}
            added = [pair for pair in _SAFE if pair[0] not in names]
            if b"cache-control" not in names:  # an answer with an ETag may be cached, and is revalidated each time
                added.append(_REVALIDATED if b"etag" in names else _NOT_CACHED)
            if scope["scheme"] == "https":
                added.append(_ALWAYS_TLS)
            message["headers"] = [*existing, *added]
        body = message.get("body", b"")
        if len(body) > _CHUNK:  # the event loop serves other requests in between
            for start in range(0, len(body) - _CHUNK, _CHUNK):
                await send({"type": message["type"], "body": body[start : start + _CHUNK], "more_body": True})
            message["body"] = body[-(len(body) % _CHUNK or _CHUNK) :]
        await send(message)

    return send_safely


_MAX_URL_LENGTH = 16_000
"""Bytes of path and query, at most."""
_AMBIGUOUS = "The request is ambiguous"
_ONCE = ((b"authorization", "Authorization"), (b"idempotency-key", "Idempotency-Key"))
"""Headers that parsers read differently if they are repeated."""


def find_ambiguity(scope: Scope) -> Response | None:
    """Return an error response for a URL that is too long, or a head with contradictory headers; otherwise None.

    A proxy in front may have used the other value.
    """
    if len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"]) > _MAX_URL_LENGTH:
        return _refusal(414, "The URL is too long", f"Path and query may have at most {_MAX_URL_LENGTH:,} bytes.")
    names = [name for name, _ in scope["headers"]]
    if b"content-length" in names and b"transfer-encoding" in names:
        return _refusal(400, _AMBIGUOUS, "It has both Content-Length and Transfer-Encoding: send one of them.")
    for name, title in _ONCE:
        if names.count(name) > 1:
            return _refusal(400, _AMBIGUOUS, f"It has the header {title} more than once: send one of them.")
    return None


def _refusal(status: int, title: str, detail: str) -> Response:
    data = msgspec.json.encode(Problem(title=title, status=status, detail=detail))
    return Response(data, status, headers={"Connection": "close"}, media_type=MEDIA_TYPE)


_TAG = r'(W/)?"([\x21\x23-\x7e\x80-\xff]*)"'
_LIST = re.compile(rf"\s*{_TAG}\s*(?:,\s*{_TAG}\s*)*")


def matches_etag(tag: str, header: str | None) -> bool:
    if header is None:
        return False
    return header.strip() == ANY or tag.strip('"') in (found for _, found in re.findall(_TAG, header))


def condition_of(headers: Headers) -> Condition:
    """Return the condition for replacing a resource. A weak tag in If-Match matches nothing (RFC 9110, 8.8.3)."""
    return Condition(one_of=_tags(headers, "If-Match", weak=False), none_of=_tags(headers, "If-None-Match", weak=True))


def _tags(headers: Headers, name: str, *, weak: bool) -> frozenset[str] | None:
    lines = headers.getlist(name)
    if not lines:
        return None
    header = ", ".join(lines)
    if header.strip() == ANY:
        return frozenset([ANY])
    if not _LIST.fullmatch(header):
        raise refused(
            400,
            "The condition is invalid",
            f'{name}: expected comma-separated ETags, such as "0a1b2c", or *; found {header!r:.100}.',
        )
    return frozenset(tag for is_weak, tag in re.findall(_TAG, header) if weak or not is_weak)
