"""Names of generations: term, serial number and something random, such as `12-1-9f86d081`.

Terms order them. They can be issued twice, should Postgres lose commits; what is random cannot.
"""

from __future__ import annotations

import re

_NAME = re.compile(r"([0-9]{1,20})-([0-9]{1,20})(?:-[0-9a-z]{1,40})?")
"""Earlier releases gave names without the last part."""


def name(term: int, serial: int, token: str) -> str:
    """Return the name of a generation."""
    return f"{term}-{serial}-{token}"


def age(generation: str) -> tuple[int, ...]:
    """Return the term and serial number of a generation; what is not ours is older than all."""
    found = _NAME.fullmatch(generation)
    return (int(found[1]), int(found[2])) if found else ()


def is_over(generation: str, now: str, *, later: bool) -> bool:
    """Say whether a generation has ended by the one that is `now`; a later one only if it has been forgotten.

    Another one of the same number was begun for a database that was lost, or is another's.
    """
    return generation != now and (later or age(generation) <= age(now))
