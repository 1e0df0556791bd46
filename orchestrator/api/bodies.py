"""Bodies of requests: limited while they are read, bounded in shape, and then decoded into types.

Python decodes JSON under its global lock, in any thread. So the limits on values, lists and levels are what keeps one
request from holding up the others: they are counted slice by slice. One large body is decoded at a time, the items of a
long list one by one; other requests get the lock between two items, and in a pause after each large body.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Annotated, Any, get_args, get_origin

import msgspec
from starlette.requests import Request

from orchestrator.api.http_protocol import LONGEST_BODY
from orchestrator.api.problems import Problem, Refused, refused, unfit
from orchestrator.domain.plain import MOST_LEVELS

LARGEST_BODY = 32_000_000
"""Bytes of a request that brings many values, or a definition."""
ONE_VALUE = 0
"""Stands for the bytes of a request that brings one value, which the settings bound."""
_PER_BYTE = 6
"""Bytes of JSON for a byte of a value as it is stored: escapes and numbers are longer, and a flow starts with two."""
_AROUND = 100_000
"""Bytes of such a request beside its value."""
LARGEST_QUESTION = 1_000_000
"""Bytes of a request that reads, of a form, and of a definition to validate."""
SMALL = 64_000
"""Bytes that are decoded on the event loop; more than that are decoded in a thread."""
MOST_VALUES = 500_000
"""Values in one body."""
MOST_CONTAINERS = 100_000
"""Lists and objects in one body."""
_SLICE = 65_536


async def read_body(request: Request, largest: int, hold: Callable[[], Awaitable[object]] | None = None) -> bytes:
    """Read a body of at most so many bytes, whether or not its length was announced; `hold` waits for room for one."""
    parts: list[bytes] = []
    size = 0
    if request.headers.get("Content-Encoding", "").strip().lower() not in ("", "identity"):
        raise _encoded(request.headers["Content-Encoding"])
    if int(request.headers.get("Content-Length", "0")) > largest:  # a client that waits for `100` need not send it
        raise _too_large(largest)
    try:
        async with asyncio.timeout(LONGEST_BODY) as limit:
            async for part in request.stream():
                size += len(part)
                if size > largest:
                    raise _too_large(largest)
                if hold is not None and size > SMALL:
                    limit.reschedule(None)
                    await hold()
                    hold = None
                    limit.reschedule(asyncio.get_running_loop().time() + LONGEST_BODY)
                parts.append(part)
    except TimeoutError:
        raise _closing(408, "The body is late", f"It has to be here within {LONGEST_BODY:g} seconds.") from None
    return b"".join(parts)


def most_bytes(declared: int, largest_value: int) -> int:
    """Return how many bytes a body may have, as its route declares them."""
    return declared or min(LARGEST_BODY, _AROUND + _PER_BYTE * largest_value)


def check_shape(data: bytes) -> None:
    """Refuse JSON with too many values, lists and objects, or levels, without building any of them."""
    values, containers, level, is_text, start = 1, 0, 0, False, 0
    while start < len(data):
        end = start + _SLICE
        slice = data[start:end]
        if (len(slice) - len(slice.rstrip(b"\\"))) % 2:  # its last character is escaped by the one before it
            slice, end = data[start : end + 1], end + 1
        start = end
        parts = slice.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[is_text::2])
        is_text ^= len(parts) % 2 == 0
        brackets = outside.translate(None, _NO_BRACKETS)
        containers += brackets.count(b"[") + brackets.count(b"{")
        values += outside.count(b",")
        levels = list(accumulate(map(_STEPS.__getitem__, brackets), initial=level))
        level = levels[-1]
        if max(levels) > MOST_LEVELS:
            raise unfit(f"The body has more than {MOST_LEVELS} levels.")
        if values > MOST_VALUES or containers > MOST_CONTAINERS:
            detail = f"It holds more than {MOST_VALUES:,} values, or more than {MOST_CONTAINERS:,} lists and objects."
            raise refused(413, "The body is too large", f"{detail} Send it in parts, or what is large as one text.")


_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in _STEPS)


def _too_large(largest: int) -> Refused:
    return _closing(413, "The body is too large", f"At most {largest:,} bytes are read here.")


def _encoded(found: str) -> Refused:
    problem = Problem(
        title="The body is encoded",
        status=415,
        detail=f"Content-Encoding: expected none, found {found!r:.100}. Send the body as it is, without compression.",
    )
    return Refused(problem, {"Connection": "close", "Accept-Encoding": "identity"})


def _closing(status: int, title: str, detail: str) -> Refused:
    """Return a refusal after which nothing more is read on the connection."""
    return Refused(Problem(title=title, status=status, detail=detail), {"Connection": "close"})


_REST = 2.0
"""Seconds of pause for each second that decoding a large body took."""
_large = threading.Lock()


class Decoder:
    """Decodes bodies of one type."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._whole = msgspec.json.Decoder(kind)
        self._name, item = _list_in(kind)
        if self._name:
            self._outer = msgspec.json.Decoder(_with_raw_items(kind, self._name))
            self._item = msgspec.json.Decoder(item)

    def decode(self, data: bytes) -> Any:
        if len(data) <= SMALL:
            return self._whole.decode(data)
        with _large:
            check_shape(data)
            began = time.thread_time()
            try:
                return self._decode_large(data)
            finally:
                time.sleep(_REST * (time.thread_time() - began))

    def _decode_large(self, data: bytes) -> Any:
        if not self._name:
            return self._whole.decode(data)
        given = msgspec.structs.asdict(self._outer.decode(data))
        given[self._name] = [self._one(number, raw) for number, raw in enumerate(given[self._name])]
        return self._kind(**given)

    def _one(self, number: int, raw: msgspec.Raw) -> Any:
        try:
            return self._item.decode(raw)
        except msgspec.ValidationError as error:
            where = f"$.{self._name}[{number}]"
            message, has_more, inner = str(error).partition(" - at `$")
            raise msgspec.ValidationError(f"{message} - at `{where}{inner if has_more else '`'}") from None


@lru_cache(None)
def decoder(kind: Any) -> Decoder:
    return Decoder(kind)


def _list_in(kind: Any) -> tuple[str, Any]:
    """Return the first field that is a list of structures, and their type; no name where there is none."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            found = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
            item = get_args(found)[0] if get_origin(found) in (list, Sequence) else None
            if isinstance(item, type) and issubclass(item, msgspec.Struct) and field.name == field.encode_name:
                return field.name, item
    return "", None


def _with_raw_items(kind: type[msgspec.Struct], name: str) -> type[msgspec.Struct]:
    """Return a type like another, in which the items of one list are left as they were sent."""
    fields: list[tuple[str, Any, Any]] = []
    for field in msgspec.structs.fields(kind):
        bounds = getattr(field.type, "__metadata__", ())
        found = list[msgspec.Raw] if field.name == name else field.type
        annotated = Annotated[(found, *bounds)] if bounds and field.name == name else found
        given = {"default": field.default, "default_factory": field.default_factory, "name": field.encode_name}
        fields.append((field.name, annotated, msgspec.field(**given)))
    is_strict = kind.__struct_config__.forbid_unknown_fields
    return msgspec.defstruct(kind.__name__, fields, kw_only=True, forbid_unknown_fields=is_strict)
