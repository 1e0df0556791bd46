"""On what condition a definition is stored: by the hashes that its newest version may have, or may not."""

from __future__ import annotations

from typing import NamedTuple

ANY = "*"
"""In the place of a hash: that there is one at all."""


class Condition(NamedTuple):
    """What must be true of the newest version before another takes its place."""

    one_of: frozenset[str] | None = None
    """It has one of these hashes."""
    none_of: frozenset[str] | None = None
    """There is none, or it has none of these hashes."""

    def refusal(self, name: str, version: int | None, hash: str | None) -> str | None:
        """Say why the condition does not hold of this version, or of there being none; None where it does."""
        found = "there is none" if hash is None else f"its version {version} has the hash {hash!r}"
        if self.one_of is not None and not _has(self.one_of, hash):
            if ANY in self.one_of:
                return f"Workflow {name!r} was to be there already, and {found}."
            expected = " or ".join(map(repr, sorted(self.one_of)))
            return (
                f"Workflow {name!r} was changed meanwhile: expected the hash {expected}, but {found}. Read it again, "
                f"and apply what is to be changed in that."
            )
        if self.none_of is not None and _has(self.none_of, hash):
            if ANY in self.none_of:
                return f"Workflow {name!r} was to be new, and there is version {version}, with the hash {hash!r}."
            return f"Workflow {name!r} was not to have this hash any more, and {found}."
        return None


def _has(hashes: frozenset[str], hash: str | None) -> bool:
    return hash is not None and (ANY in hashes or hash in hashes)


ALWAYS = Condition()
