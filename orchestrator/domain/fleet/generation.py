"""Names of generations: term, serial number and a random token, such as `12-1-9f86d081`.

Terms order generations. If Postgres loses commits, a term can be issued twice, but with another token. From then on,
names also carry the token of the first generation after the loss: `13-1-0a1b2c3dz0a1b2c3d`, and later
`13-2-77aa88bbz0a1b2c3d`. So a worker learns of the loss from any of them. Workers of earlier releases take all of it
for the token.
"""

from __future__ import annotations

import re

_NAME = re.compile(r"([0-9]{1,20})-([0-9]{1,20})(?:-[0-9a-z]{1,40})?")
"""Names of earlier releases lack the token."""


_REWIND_MARK = "z"
"""Separates the tokens. Tokens are hexadecimal and never contain this letter."""


def name(term: int, serial: int, token: str, rewind: str = "") -> str:
    """Return the name of a generation. `rewind` is the token of the last one that began because commits were lost."""
    return f"{term}-{serial}-{token}{_REWIND_MARK if rewind else ''}{rewind}"


def rewind_of(generation: str) -> str:
    """Return the token of the last loss of commits up to this generation. Empty if there was none."""
    return generation.rpartition("-")[2].partition(_REWIND_MARK)[2]


def age(generation: str) -> tuple[int, ...]:
    """Return the term and serial number of a generation. An unknown format sorts before all others."""
    match = _NAME.fullmatch(generation)
    return (int(match[1]), int(match[2])) if match else ()


def is_over(generation: str, now: str, *, later: bool) -> bool:
    """Return whether a generation has ended, given the current one `now`.

    With `later`, those with higher numbers have ended, too: Postgres has lost them. Another one with the same number
    belongs to a lost database or another system.
    """
    return generation != now and (later or age(generation) <= age(now))
