"""Arguments and results as people read them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn

import msgspec

from orchestrator.harmless import harmless_json
from orchestrator.sdk.values.payload import decode_value

_LONGEST = 1_000
"""Characters of one value, where it stands among others."""


def call_of(payload: bytes) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a task, whoever made it; a turn of a workflow as code has none.

    Tasks of steps, hooks and schedules carry where they belong beside their arguments.
    """
    if not payload:
        return [], {}
    match stored_value(payload):
        case [list(arguments), dict(keywords), *_]:
            return arguments, keywords
        case damaged:
            return [damaged], {}


def stored_value(data: bytes) -> Any:
    """Return the value that is stored, or the bytes themselves where they are none."""
    try:
        return decode_value(data)
    except ValueError:
        return data


def call_text(name: str, payload: bytes) -> str:
    """Return an encoded call as one would write it: `resize("a.png", width=200)`."""
    arguments, keywords = call_of(payload)
    written: Iterable[str] = (
        *(short_text(argument) for argument in arguments),
        *(f"{keyword}={short_text(argument)}" for keyword, argument in keywords.items()),
    )
    return f"{name}({', '.join(written)})"


def data_text(plain: Any) -> str:
    """Return plain data as JSON or, where JSON has no word for it, as Python writes it."""
    if isinstance(plain, bytes):
        return repr(plain)
    try:
        return harmless_json(json.dumps(msgspec.to_builtins(plain, str_keys=True), ensure_ascii=False))
    except (TypeError, ValueError):
        return repr(plain)


def short_text(plain: Any) -> str:
    """Return plain data as a person reads it among other things: of what is long, the beginning."""
    text = data_text(plain)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}… ({len(text):,} characters; all of them: --json)"


def as_json(plain: Any) -> Any:
    """Return plain data as it can stand in a JSON document, whatever it is."""
    try:
        return msgspec.to_builtins(plain, str_keys=True)
    except (TypeError, ValueError):
        return repr(plain)


def parse_value(word: str) -> Any:
    """Return a word of the command line as JSON if it reads as such, else as a string."""
    try:
        return json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return word


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
