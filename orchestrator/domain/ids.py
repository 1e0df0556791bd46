"""Ids that sort by creation time (UUIDv7), and ids derived from others.

Time-ordered ids keep the primary key's index growing at its right edge, so that inserts stay as cheap with
ten million finished tasks as with none.
"""

from __future__ import annotations

import hashlib

_VERSION_7 = 0x7000_8000_0000_0000_0000
_RANDOM = 0x0FFF_3FFF_FFFF_FFFF_FFFF
"""The bits after the time that say nothing about the kind of id."""


def time_ordered_id(milliseconds: int, noise: bytes) -> bytes:
    """Return a UUIDv7 from a Unix time in milliseconds and ten random bytes."""
    random = int.from_bytes(noise, "big") & _RANDOM
    return ((milliseconds & 0xFFFF_FFFF_FFFF) << 80 | random | _VERSION_7).to_bytes(16, "big")


def derived_id(parent: bytes, *parts: str | int) -> bytes:
    """Return the same id for the same parent and parts, always; it sorts beside its parent.

    It is a UUIDv8: the parent's time stamp, then a hash.
    """
    hashed = bytearray(hashlib.blake2b(repr((parent, parts)).encode(), digest_size=10).digest())
    hashed[0] = 0x80 | hashed[0] & 0x0F
    hashed[2] = 0x80 | hashed[2] & 0x3F
    return parent[:6] + hashed


def tree_of(run: bytes) -> bytes:
    """Return what the ids of all runs that came of one another begin with: the time stamp of the first."""
    return run[:6]


def is_derived(identifier: bytes) -> bool:
    """Say whether an id looks like one that was derived from another."""
    return identifier[6] >> 4 == 8


def successor_id(run: bytes) -> bytes:
    """Return the id of the run in which a run goes on that continues as a new one, or is reset while it is open."""
    return derived_id(run, "continued")


def to_text(identifier: bytes) -> str:
    """Return the usual text form of an id."""
    digits = identifier.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def about_run(run: bytes) -> dict[str, str]:
    """Return what a line of the log about a run knows of it."""
    return {"run_id": to_text(run)}
