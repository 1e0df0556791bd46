"""Moves large values to the payload store, and reads them back.

A process can read from all stores that its settings have named so far, just as it can decrypt with all its data keys.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import IO, Protocol, TypeVar

from orchestrator.domain.tasks.obstacles import PAYLOAD_STORE
from orchestrator.errors import PayloadError, Unavailable
from orchestrator.payloads.objects import Gone, Output, Reader, Reading, Writing, object_name, write
from orchestrator.payloads.stores import Notes, Patient, Patiently, Store, at_once, open_store
from orchestrator.references import ARGUMENTS, BYTES, RESULT, Reference
from orchestrator.sealing import Vault, vault_of
from orchestrator.settings import Settings

T = TypeVar("T")
STORE_CAPABILITY = PAYLOAD_STORE
"""Reported by a worker without a store, in the place of the id of a missing data key."""


class NoStore(PayloadError):
    """A payload is stored externally, and this process has no payload store."""


class Opener(Protocol):
    """Reads the payloads of references."""

    def encoded(self, reference: Reference) -> bytes:
        """Return the value as encoded data."""

    def open(self, reference: Reference) -> IO[bytes]:
        """Return the stored bytes as a file."""


_openers: dict[str, Opener] = {}
"""The openers of this process, by location."""


class PayloadStore:
    """Stores values too large for a row or a message, and reads them."""

    def __init__(self, store: Store, inline: int, vault: Vault | None) -> None:
        self.store = store
        self.inline = inline
        """Bytes up to which a value stays inline."""
        self._vault = vault
        _openers.setdefault(store.place, self)

    def arguments(self, data: bytes, task: bytes, run: bytes | None) -> bytes:
        """Return the arguments of a task, or a reference if they are large."""
        return self._store_if_large(data, run or task, task, 0, ARGUMENTS)

    def result(self, data: bytes, task: bytes, run: bytes | None, attempt: int) -> bytes:
        """Return the result of an attempt, or a reference if it is large."""
        return self._store_if_large(data, run or task, task, attempt, RESULT)

    def _store_if_large(self, data: bytes, owner: bytes, task: bytes, attempt: int, what: str) -> bytes:
        if len(data) <= self.inline:
            return data
        return write(self.store, object_name(owner, task, attempt, what), data, self._vault).encoded()

    def output(self, task: bytes, run: bytes | None, attempt: int, patiently: Patiently = at_once) -> Output:
        """Return a file. The bytes written to it become the result of an attempt."""
        name = object_name(run or task, task, attempt, RESULT)
        return Output(partial(Writing, Patient(self.store, patiently), name, self._vault), self.inline, _never)

    def encoded(self, reference: Reference) -> bytes:
        """Return the value as encoded data."""
        with closing(Reading(self.store, reference)) as reading:
            return reading.encoded()

    def open(self, reference: Reference) -> IO[bytes]:
        """Return the stored bytes as a file."""
        return io.BufferedReader(Reader(Reading(self.store, reference)))

    def chunks(self, reference: Reference) -> Iterator[bytes]:
        """Yield the encoded value. Bytes are yielded raw, chunk by chunk."""
        if reference.form != BYTES:
            yield self.encoded(reference)
            return
        with closing(Reading(self.store, reference)) as reading:
            yield from reading.each()


def _never(size: int) -> PayloadError:
    return PayloadError(f"{size:,} bytes")


def store_of(settings: Settings, notes: Callable[[Settings], Notes] | None = None) -> PayloadStore | None:
    """Return the store that the settings name, or None. From now on, this process reads from it.

    `notes` remembers which folders are in use.
    """
    if not settings.payload_store:
        return None
    keys = settings.data_keys, settings.data_keys_file
    key = (settings.payload_store, settings.root, settings.redis_url, settings.inline_payload, *keys)
    if key not in _known:
        store = open_store(settings.payload_store, settings.root, None if notes is None else notes(settings))
        _known[key] = PayloadStore(store, settings.inline_payload, vault_of(settings))
    return _known[key]


_known: dict[tuple[object, ...], PayloadStore] = {}


def register(place: str, opener: Opener) -> None:
    """Let this process also read through another opener."""
    _openers[place] = opener


def forget(place: str) -> None:
    """Stop reading through an opener."""
    _openers.pop(place, None)


def read_encoded(reference: Reference) -> bytes:
    """Return the encoded value of a reference, from any store of this process."""
    return _first(reference, lambda opener: opener.encoded(reference))


def open_bytes(reference: Reference) -> IO[bytes]:
    """Return the bytes of a reference as a file."""
    return _first(reference, lambda opener: opener.open(reference))


def _first(reference: Reference, read: Callable[[Opener], T]) -> T:
    problem: Exception | None = None
    for opener in reversed(list(_openers.values())):
        try:
            return read(opener)
        except Gone as error:
            problem = problem or error
        except Unavailable as error:  # this store may have the payload
            problem = error if problem is None or isinstance(problem, Gone) else problem
    raise problem or NoStore(
        f"A payload of {reference.size:,} bytes is in a payload store, but this process has none. See the setting "
        f"payload_store."
    )
