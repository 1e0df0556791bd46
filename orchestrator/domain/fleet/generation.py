"""Names of generations: term, serial number and something random, such as `12-1-9f86d081`.

Terms order them. They can be issued twice, should Postgres lose commits; what is random cannot. Once that has happened,
names say when it last did: `13-1-0a1b2c3dz0a1b2c3d` began because of it, and `13-2-77aa88bbz0a1b2c3d` came later. So a
worker knows it whichever of them it hears of first. A worker of an earlier release takes it all for something random.
"""

from __future__ import annotations

import re

_NAME = re.compile(r"([0-9]{1,20})-([0-9]{1,20})(?:-[0-9a-z]{1,40})?")
"""Earlier releases gave names without the last part."""


_REWIND = "z"
"""No token has this letter: they are hexadecimal."""


def name(term: int, serial: int, token: str, rewind: str = "") -> str:
    """Return the name of a generation; `rewind` is the token of the last that began because commits were lost."""
    return f"{term}-{serial}-{token}{_REWIND if rewind else ''}{rewind}"


def rewind_of(generation: str) -> str:
    """Return which loss of commits was the last before or at this generation; empty if there was none."""
    return generation.rpartition("-")[2].partition(_REWIND)[2]


def age(generation: str) -> tuple[int, ...]:
    """Return the term and serial number of a generation; what is not ours is older than all."""
    found = _NAME.fullmatch(generation)
    return (int(found[1]), int(found[2])) if found else ()


def is_over(generation: str, now: str, *, later: bool) -> bool:
    """Say whether a generation has ended by the one that is `now`; a later one only if it has been forgotten.

    Another one of the same number was begun for a database that was lost, or is another's.
    """
    return generation != now and (later or age(generation) <= age(now))
