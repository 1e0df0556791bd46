"""Arguments and results as people read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import msgspec

from orchestrator.domain import redaction
from orchestrator.domain.redaction import Redaction
from orchestrator.sdk.values import display
from orchestrator.sdk.values.display import as_json
from orchestrator.settings import load_settings
from orchestrator.terminal_safe import terminal_safe_json

__all__ = ["as_json", "call_of", "call_text", "data_text", "hidden", "parse_value", "short_text", "stored_value"]

_LONGEST = 1_000
"""Characters of one value, where it stands among others."""


def hidden(options: Mapping[str, Any] | None = None) -> Redaction:
    """Return what is not shown: anywhere, and of a task with these options."""
    own = (pattern for name in ("redact", "inherited") for pattern in (options or {}).get(name, ()))
    return Redaction((*redaction.words(load_settings().redact), *own))


def call_of(payload: bytes, options: Mapping[str, Any] | None = None) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a task, without what nobody is shown."""
    return hidden(options).call_shown(*display.call_of(payload))


def stored_value(data: bytes, options: Mapping[str, Any] | None = None) -> Any:
    """Return the value that is stored, without what nobody is shown."""
    return hidden(options).shown(display.stored_value(data))


def call_text(name: str, payload: bytes, options: Mapping[str, Any] | None = None) -> str:
    """Return an encoded call as one would write it: `resize("a.png", width=200)`."""
    arguments, keywords = call_of(payload, options)
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
        return terminal_safe_json(
            json.dumps(msgspec.to_builtins(plain, str_keys=True, enc_hook=display.described_value), ensure_ascii=False)
        )
    except (TypeError, ValueError):
        return repr(plain)


def short_text(plain: Any) -> str:
    """Return plain data as a person reads it among other things: of what is long, the beginning."""
    text = data_text(plain)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}… ({len(text):,} characters; all of them: --json)"


def parse_value(word: str) -> Any:
    """Return a word of the command line as JSON if it reads as such, else as a string."""
    try:
        return json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return word


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
