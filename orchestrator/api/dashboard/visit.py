"""Who looks at a page, and what they may do there."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.domain.access import KeyScope, Scope


class Said(NamedTuple):
    """What became of what somebody did on the page before."""

    text: str
    is_error: bool = False


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One look at a page."""

    who: str
    scope: Scope
    key_scope: KeyScope
    path: str
    """The page, as its address has it."""
    query: str
    token: str
    """What a form has to send along."""
    said: Said | None = None
    has_key: bool = False
    """They have logged in with a key, and can log out."""

    @property
    def here(self) -> str:
        """The address of the page itself, to come back to."""
        return f"{self.path}?{self.query}" if self.query else self.path

    def may(self, scope: str) -> bool:
        """Say whether something is offered."""
        return self.scope.includes(Scope(scope))

    @property
    def sees_all(self) -> bool:
        """Say whether the system as a whole is shown."""
        return not self.key_scope.is_bound


current: ContextVar[Visit | None] = ContextVar("orchestrator_visit", default=None)
"""Set while a page is made."""

prefix: ContextVar[str] = ContextVar("orchestrator_prefix", default="")
"""What stands before the address of every page in the browser of who looks; a proxy has cut it off."""


def key_scope_of_visitor() -> KeyScope:
    """Return what who looks at the page may have to do with."""
    visit = current.get()
    assert visit is not None, "a page is being made"
    return visit.key_scope
