"""Ids that sort by creation time (UUIDv7), and ids derived from other ids.

Time-ordered ids are inserted at the right edge of the primary key's index, so that inserts stay cheap with ten million
ended tasks.
"""

from __future__ import annotations

import hashlib

_VERSION_7 = 0x7000_8000_0000_0000_0000
_RANDOM = 0x0FFF_3FFF_FFFF_FFFF_FFFF
"""The mask of the bits that are neither time, version nor variant."""


def time_ordered_id(milliseconds: int, noise: bytes) -> bytes:
    """Return a UUIDv7 from a Unix time in milliseconds and ten random bytes."""
    random = int.from_bytes(noise, "big") & _RANDOM
    return ((milliseconds & 0xFFFF_FFFF_FFFF) << 80 | random | _VERSION_7).to_bytes(16, "big")


def derived_id(parent: bytes, *parts: str | int) -> bytes:
    """Return an id that depends only on the parent and the parts. It sorts next to its parent.

    It is a UUIDv8: the parent's timestamp, then a hash.
    """
    hashed = bytearray(hashlib.blake2b(repr((parent, parts)).encode(), digest_size=10).digest())
    hashed[0] = 0x80 | hashed[0] & 0x0F
    hashed[2] = 0x80 | hashed[2] & 0x3F
    return parent[:6] + hashed


def tree_of(run: bytes) -> bytes:
    """Return the prefix that a run shares with all runs derived from it: the timestamp of the root run."""
    return run[:6]


def is_derived(identifier: bytes) -> bool:
    """Return whether an id has the form of a derived id."""
    return identifier[6] >> 4 == 8


def successor_id(run: bytes) -> bytes:
    """Return the id of the run that follows when a run continues as new, or is reset while open."""
    return derived_id(run, "continued")


def to_text(identifier: bytes) -> str:
    """Return the usual text form of an id."""
    digits = identifier.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def run_log_fields(run: bytes) -> dict[str, str]:
    """Return the log fields that identify a run."""
    return {"run_id": to_text(run)}
