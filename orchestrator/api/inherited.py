"""Redaction that a task or run inherits: secrets of related tasks and runs stay hidden in its own values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.domain.redaction import Redaction, by_name
from orchestrator.errors import OrchestratorError
from orchestrator.references import may_hold_references, whole_reference
from orchestrator.sdk.values.payload import decode_call, decode_value
from orchestrator.sealing import is_sealed
from orchestrator.store.insights.redact import MAX_RELATIVES, Family

_MAX_STORED_SIZE = 1_000_000
"""Bytes of a payload in the payload store that is read to find secrets, at most."""


class _SecretsUnknown(Exception):
    """The secrets in a value cannot be determined."""


def inherited(family: Family, everywhere: Sequence[str], own: Sequence[str] = ()) -> Redaction:
    """Return the redaction of a family. `everywhere` are the patterns of the settings, `own` those of the task.

    If not all secrets can be found, a task with its own patterns is redacted by patterns, and anything else entirely.
    """
    patterns = (*everywhere, *family.patterns, *own)
    try:
        if family.is_partial:
            raise _SecretsUnknown
        return Redaction(patterns, _secrets(family, everywhere))
    except (_SecretsUnknown, OrchestratorError, ValueError):
        return Redaction(patterns, is_whole=not own)


def secrets_of(patterns: Sequence[str], payload: bytes, result: bytes | None) -> Iterator[str]:
    """Yield the secret values in a task's arguments and result."""
    hidden = Redaction(patterns)
    if payload and _is_readable(payload):
        arguments, keywords, *_ = decode_call(payload)
        yield from hidden.secrets_in(by_name(arguments, keywords))
    if result is not None and _is_readable(result):
        yield from hidden.secrets_in(decode_value(result))


def _secrets(family: Family, everywhere: Sequence[str]) -> Iterator[str]:
    for relative in family.relatives:
        yield from secrets_of((*everywhere, *relative.patterns), relative.payload, relative.result)
    hidden = Redaction((*everywhere, *family.patterns))
    for value in family.parameters:
        yield from hidden.secrets_in(value)
    stored = sum(may_hold_references(data) for _, data in family.event_values)
    if stored > MAX_RELATIVES:
        raise _SecretsUnknown
    for name, data in family.event_values:
        if _is_readable(data):
            yield from hidden.secrets_in({name: decode_value(data)})


def _is_readable(data: bytes) -> bool:
    """Return whether data can be searched. Sealed data cannot, but only clients with the key can open it."""
    stored = whole_reference(data)
    if may_hold_references(data) and (stored is None or stored.size > _MAX_STORED_SIZE):
        raise _SecretsUnknown
    return not is_sealed(data)
