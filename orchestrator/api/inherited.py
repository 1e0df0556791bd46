"""Redaction that a task or a run inherits: secrets of its relatives stay hidden in its own values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.domain.redaction import Redaction, by_name
from orchestrator.errors import OrchestratorError
from orchestrator.references import may_hold_references, whole_reference
from orchestrator.sdk.values.payload import decode_call, decode_value
from orchestrator.sealing import is_sealed
from orchestrator.store.insights.redact import MOST_RELATIVES, Family

_LARGEST_STORED = 1_000_000
"""Bytes of a payload in the store that is read to know what is secret in it."""


class _Unknown(Exception):
    """The secrets in a value cannot be found."""


def inherited(family: Family, everywhere: Sequence[str], own: Sequence[str] = ()) -> Redaction:
    """Return what is not shown in a family; `everywhere` are the patterns of the settings, `own` those of the task.

    Where not all secrets can be known, a task with patterns of its own is hidden by these, and all else as a whole.
    """
    patterns = (*everywhere, *family.patterns, *own)
    try:
        if family.is_partial:
            raise _Unknown
        return Redaction(patterns, _values(family, everywhere))
    except (_Unknown, OrchestratorError, ValueError):
        return Redaction(patterns, is_whole=not own)


def secrets_of(patterns: Sequence[str], payload: bytes, result: bytes | None) -> Iterator[str]:
    """Yield the values that are secret in what a task was given, and has returned."""
    hidden = Redaction(patterns)
    if payload and _is_readable(payload):
        arguments, keywords, *_ = decode_call(payload)
        yield from hidden.secrets_in(by_name(arguments, keywords))
    if result is not None and _is_readable(result):
        yield from hidden.secrets_in(decode_value(result))


def _values(family: Family, everywhere: Sequence[str]) -> Iterator[str]:
    for one in family.relatives:
        yield from secrets_of((*everywhere, *one.patterns), one.payload, one.result)
    hidden = Redaction((*everywhere, *family.patterns))
    for value in family.given:
        yield from hidden.secrets_in(value)
    stored = sum(may_hold_references(data) for _, data in family.said)
    if stored > MOST_RELATIVES:
        raise _Unknown
    for name, data in family.said:
        if _is_readable(data):
            yield from hidden.secrets_in({name: decode_value(data)})


def _is_readable(data: bytes) -> bool:
    """Say whether data can be searched: sealed data is shown only to clients that can open it."""
    stored = whole_reference(data)
    if may_hold_references(data) and (stored is None or stored.size > _LARGEST_STORED):
        raise _Unknown
    return not is_sealed(data)
