"""Headers: a few short texts, by name, that a task or run passes on to everything it starts.

They are part of the options of a task, and a column of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

import msgspec

from orchestrator.domain.tasks.task import parse_options
from orchestrator.errors import InvalidTask

MAX_BYTES = 4_096
"""The maximum size of all headers of a task or run, as JSON."""

HTTP_HEADER = "Orchestrator-Headers"
"""The HTTP header that carries the headers of the run to start, as JSON."""

of_start: ContextVar[Mapping[str, str] | None] = ContextVar("orchestrator_headers", default=None)
"""The headers of the run that the current call starts."""


def headers_of_start() -> str | None:
    """Return `of_start` as JSON, or None without headers."""
    headers = of_start.get()
    return msgspec.json.encode(headers).decode() if headers else None


def check_headers(headers: object) -> dict[str, str]:
    """Return the headers as a dict, or raise InvalidTask."""
    if not isinstance(headers, Mapping):
        raise InvalidTask(
            f'Headers: expected a mapping of names to strings, such as {{"tenant": "acme"}}, found {headers!r:.200}.'
        )
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidTask(f"Headers: expected a string as value, found {value!r:.100} under {name!r:.100}.")
        if not name or "\0" in name + value or not _is_encodable(name + value):
            raise InvalidTask(
                f"Header {name!r:.100}: a header needs a name, and strings that UTF-8 and Postgres can store."
            )
    size = len(msgspec.json.encode(headers))
    if size > MAX_BYTES:
        raise InvalidTask(
            f"Headers: {size:,} bytes as JSON; at most {MAX_BYTES:,} are allowed. The largest is "
            f"{max(headers, key=lambda name: len(headers[name]))!r:.100}. Pass data as arguments, or a reference to it."
        )
    return dict(headers)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_headers(text: str | bytes) -> dict[str, str]:
    """Parse headers from JSON, or raise InvalidTask."""
    try:
        return check_headers(msgspec.json.decode(text))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidTask(f"Headers cannot be read: {error}.") from None


def headers_of(options: str | None) -> dict[str, str]:
    return {} if options is None else parse_options(options).headers


def with_headers(options: str | None, headers: Mapping[str, str]) -> str | None:
    """Return stored options with their headers replaced."""
    if not headers and not headers_of(options):
        return options
    return msgspec.json.encode(msgspec.structs.replace(parse_options(options), headers=dict(headers))).decode()


def inheriting(options: str | None, headers: Mapping[str, str]) -> str | None:
    """Return stored options with inherited headers added. The task's own headers take precedence."""
    return with_headers(options, {**headers, **headers_of(options)})
