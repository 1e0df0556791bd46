"""Keys of the HTTP API: what one looks like, and what it may do."""

from __future__ import annotations

import hashlib
import re
from datetime import datetime
from enum import StrEnum
from hmac import compare_digest
from typing import NamedTuple

from orchestrator.domain.quotas import DEFAULTS, Quotas

_PREFIX = "orc"
_KEY = re.compile(rf"{_PREFIX}_([0-9a-f]{{12}})_([\w-]{{43}})")
"""Something to find it by, and 256 random bits; the prefix lets scanners of secrets know it."""
_TICKET = re.compile(r"[A-Za-z0-9_-]{43}")
_LOOKS_LIKE_ONE = re.compile(rf"{_PREFIX}_([0-9a-f]{{12}})_[\w-]+")


class Scope(StrEnum):
    """Scopes of a key; each includes those before it."""

    READ = "read"
    """Look at everything."""
    ENQUEUE = "enqueue"
    """Start tasks and runs, and post events."""
    OPERATE = "operate"
    """Cancel, retry, delete, pause, limit, apply, signal."""
    ADMIN = "admin"
    """Make and revoke keys."""

    def includes(self, other: Scope) -> bool:
        order = list(Scope)
        return order.index(self) >= order.index(other)


_NOTHING = "\n"
"""Begins no name."""


BUILT_IN = "orchestrator."
"""How the names of tasks begin that every worker knows, such as `orchestrator.webhook`."""


class KeyScope(NamedTuple):
    """The queues, workflows and tasks that a key is for, by how their names begin."""

    queues: str = ""
    workflows: str = ""
    tasks: tuple[str, ...] = ()
    """Prefixes of the names of tasks that may be enqueued; empty for all."""

    @classmethod
    def of(cls, queues: str | None, workflows: str | None, tasks: str | None = None) -> KeyScope:
        """Return the scope of a key. One that names only queues is for no workflow, and the other way round."""
        named = tuple(tasks.split(",")) if tasks else ()
        if queues is None and workflows is None:
            return cls(tasks=named)
        return cls(_NOTHING if queues is None else queues, _NOTHING if workflows is None else workflows, named)

    @property
    def is_bound(self) -> bool:
        """Say whether there is anything that is out of it."""
        return bool(self.queues or self.workflows or self.tasks)

    def has_task(self, name: str) -> bool:
        """Say whether a task may be enqueued."""
        return not self.tasks or name.startswith(self.tasks)

    def grants(self, name: str) -> bool:
        """Say whether a built-in task is named explicitly: that permission comes with no other."""
        return any(name.startswith(prefix) for prefix in self.tasks if prefix.startswith(BUILT_IN))

    def has_queue(self, name: str) -> bool:
        return name.startswith(self.queues)

    def has_workflow(self, name: str | None) -> bool:
        """Say whether a workflow is in it. A run without a workflow is only for keys that see all workflows."""
        return (name or "").startswith(self.workflows)


class Secret(NamedTuple):
    """A key in its two parts."""

    id: str
    secret: str

    def __str__(self) -> str:
        return f"{_PREFIX}_{self.id}_{self.secret}"

    @property
    def hash(self) -> bytes:
        """The stored hash. The secret is random throughout, so nothing slower is needed."""
        return hashlib.sha256(self.secret.encode()).digest()


class Ticket(NamedTuple):
    """What the browser sends after a log-in instead of a key: 256 random bits, for a session."""

    text: str

    @property
    def hash(self) -> bytes:
        return hashlib.sha256(self.text.encode()).digest()

    @property
    def id(self) -> str:
        return self.hash.hex()

    @property
    def form_token(self) -> str:
        """The token of forms of this session; the ticket cannot be derived from it."""
        return hashlib.sha256(f"form {self.text}".encode()).hexdigest()


def parse_ticket(text: str) -> Ticket | None:
    return Ticket(text) if _TICKET.fullmatch(text) else None


def parse(text: str) -> Secret | None:
    """Return a key from its text, or None if it is none."""
    found = _KEY.fullmatch(text)
    return Secret(*found.groups()) if found else None


def masked(text: str) -> str:
    """Return a text in which every key is hidden."""
    return _LOOKS_LIKE_ONE.sub(rf"{_PREFIX}_\1_•••", text)


class Key(NamedTuple):
    id: str
    name: str
    hash: bytes
    scope: Scope
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    queues: str | None = None
    """The prefix of the names of its queues."""
    workflows: str | None = None
    """The prefix of the names of its workflows."""
    tasks: str | None = None
    """The prefixes of the names of the tasks that it may enqueue, with commas between."""
    quotas: Quotas = DEFAULTS
    """How much it may ask for."""

    @property
    def key_scope(self) -> KeyScope:
        """Its key scope: everything, unless it is bound to something."""
        return KeyScope.of(self.queues, self.workflows, self.tasks)

    def is_of(self, given: Secret) -> bool:
        """Say whether this is the very key, whatever its scope, in constant time."""
        return compare_digest(self.hash, given.hash)

    def refusal(self, given: Secret, now: datetime) -> str | None:
        """Say why it does not let its bearer in; None if it does."""
        return self.fault(now) if self.is_of(given) else "no such key"

    def fault(self, now: datetime) -> str | None:
        """Say why the key is invalid; None if it is valid."""
        if self.revoked_at is not None:
            return "the key was revoked"
        if self.expires_at is not None and self.expires_at <= now:
            return "the key has expired"
        return None
