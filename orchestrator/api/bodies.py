"""Request bodies: limited in size while they are read, then limited in shape, then decoded into types.

Python decodes JSON while it holds the GIL, in any thread. So limits on values, containers and depth, which are counted
slice by slice, keep one request from delaying all others. One large body is decoded at a time, and long lists item by
item: other requests get the GIL between two items, and in a pause after each large body.
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

from orchestrator.api.http_protocol import BODY_TIMEOUT
from orchestrator.api.problems import Problem, Refused, invalid, refused
from orchestrator.domain.plain import MAX_LEVELS

MAX_BODY = 32_000_000
"""Bytes of a request with many values, or a definition."""
ONE_VALUE = 0
"""Stands for the maximum of a request with one value, which the settings define."""
_JSON_BYTES_PER_BYTE = 6
"""Bytes of JSON for each byte of a stored value. Escapes and numbers are longer in JSON, and a flow starts with two
values."""
_OVERHEAD = 100_000
"""Bytes of such a request besides its value."""
MAX_SMALL_REQUEST = 1_000_000
"""Bytes of a request that reads, of a form, and of a definition to validate."""
SMALL_BODY = 64_000
"""Bytes that are decoded on the event loop; larger bodies are decoded in a thread."""
MAX_VALUES = 500_000
"""Values in one body, at most."""
MAX_CONTAINERS = 100_000
"""Lists and objects in one body, at most."""
_SLICE = 65_536


async def read_body(request: Request, maximum: int, hold: Callable[[], Awaitable[object]] | None = None) -> bytes:
    """Read a body up to a maximum size, with or without Content-Length. `hold` waits for a slot for a large body."""
    parts: list[bytes] = []
    size = 0
    if request.headers.get("Content-Encoding", "").strip().lower() not in ("", "identity"):
        raise _encoded(request.headers["Content-Encoding"])
    if int(request.headers.get("Content-Length", "0")) > maximum:  # known before the client sends the body
        raise _too_large(maximum)
    try:
        async with asyncio.timeout(BODY_TIMEOUT) as limit:
            async for part in request.stream():
                size += len(part)
                if size > maximum:
                    raise _too_large(maximum)
                if hold is not None and size > SMALL_BODY:
                    limit.reschedule(None)
                    await hold()
                    hold = None
                    limit.reschedule(asyncio.get_running_loop().time() + BODY_TIMEOUT)
                parts.append(part)
    except TimeoutError:
        raise _closing(408, "The body is late", f"It must arrive within {BODY_TIMEOUT:g} seconds.") from None
    return b"".join(parts)


def max_body_size(declared: int, largest_value: int) -> int:
    """Return the maximum size of a body, from the declaration of its route."""
    return declared or min(MAX_BODY, _OVERHEAD + _JSON_BYTES_PER_BYTE * largest_value)


def check_shape(data: bytes) -> None:
    """Reject JSON with too many values, containers or levels, without decoding it."""
    values, containers, level, is_text, start = 1, 0, 0, False, 0
    while start < len(data):
        end = start + _SLICE
        slice = data[start:end]
        if (len(slice) - len(slice.rstrip(b"\\"))) % 2:  # its last character is escaped by the one before
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
        if max(levels) > MAX_LEVELS:
            raise invalid(f"The body has more than {MAX_LEVELS} levels of nesting.")
        if values > MAX_VALUES or containers > MAX_CONTAINERS:
            detail = f"It holds more than {MAX_VALUES:,} values, or more than {MAX_CONTAINERS:,} lists and objects."
            raise refused(
                413, "The body is too large", f"{detail} Split it, or send the large part as a single string."
            )


_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in _STEPS)


def _too_large(maximum: int) -> Refused:
    return _closing(413, "The body is too large", f"This route accepts at most {maximum:,} bytes.")


def _encoded(found: str) -> Refused:
    problem = Problem(
        title="The body is encoded",
        status=415,
        detail=f"Content-Encoding: expected none, found {found!r:.100}. Send the body as it is, without compression.",
    )
    return Refused(problem, {"Connection": "close", "Accept-Encoding": "identity"})


def _closing(status: int, title: str, detail: str) -> Refused:
    """Return a refusal after which the connection is closed."""
    return Refused(Problem(title=title, status=status, detail=detail), {"Connection": "close"})


_PAUSE_FACTOR = 2.0
"""Seconds of pause for each second of decoding a large body."""
_large_lock = threading.Lock()


class Decoder:
    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)
        self._list_name, item = _list_in(kind)
        if self._list_name:
            self._outer_decoder = msgspec.json.Decoder(_with_raw_items(kind, self._list_name))
            self._item_decoder = msgspec.json.Decoder(item)

    def decode(self, data: bytes) -> Any:
        if len(data) <= SMALL_BODY:
            return self._decoder.decode(data)
        with _large_lock:
            check_shape(data)
            began = time.thread_time()
            try:
                return self._decode_large(data)
            finally:
                time.sleep(_PAUSE_FACTOR * (time.thread_time() - began))

    def _decode_large(self, data: bytes) -> Any:
        if not self._list_name:
            return self._decoder.decode(data)
        fields = msgspec.structs.asdict(self._outer_decoder.decode(data))
        fields[self._list_name] = [self._decode_item(number, raw) for number, raw in enumerate(fields[self._list_name])]
        return self._kind(**fields)

    def _decode_item(self, number: int, raw: msgspec.Raw) -> Any:
        try:
            return self._item_decoder.decode(raw)
        except msgspec.ValidationError as error:
            where = f"$.{self._list_name}[{number}]"
            message, has_more, inner = str(error).partition(" - at `$")
            raise msgspec.ValidationError(f"{message} - at `{where}{inner if has_more else '`'}") from None


@lru_cache(None)
def decoder(kind: Any) -> Decoder:
    return Decoder(kind)


def _list_in(kind: Any) -> tuple[str, Any]:
    """Return the first field that is a list of structs, and their type; an empty name if there is none."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            field_type = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
            item = get_args(field_type)[0] if get_origin(field_type) in (list, Sequence) else None
            if isinstance(item, type) and issubclass(item, msgspec.Struct) and field.name == field.encode_name:
                return field.name, item
    return "", None


def _with_raw_items(kind: type[msgspec.Struct], name: str) -> type[msgspec.Struct]:
    """Return a copy of a struct type in which the items of one list stay undecoded."""
    fields: list[tuple[str, Any, Any]] = []
    for field in msgspec.structs.fields(kind):
        bounds = getattr(field.type, "__metadata__", ())
        field_type = list[msgspec.Raw] if field.name == name else field.type
        annotated = Annotated[(field_type, *bounds)] if bounds and field.name == name else field_type
        options = {"default": field.default, "default_factory": field.default_factory, "name": field.encode_name}
        fields.append((field.name, annotated, msgspec.field(**options)))
    is_strict = kind.__struct_config__.forbid_unknown_fields
    return msgspec.defstruct(kind.__name__, fields, kw_only=True, forbid_unknown_fields=is_strict)
