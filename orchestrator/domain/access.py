"""API keys of the HTTP API: their text form, and the permissions of each key."""

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
"""The key's id and 256 random bits. The prefix lets secret scanners recognize the key."""
_TICKET = re.compile(r"[A-Za-z0-9_-]{43}")
_KEY_LIKE = re.compile(rf"{_PREFIX}_([0-9a-f]{{12}})_[\w-]+")


class Scope(StrEnum):
    """Scopes of a key. Each scope includes the scopes before it."""

    READ = "read"
    """Read everything."""
    ENQUEUE = "enqueue"
    """Start tasks and runs, and post events."""
    OPERATE = "operate"
    """Cancel, retry, delete, pause, limit, apply, signal."""
    ADMIN = "admin"
    """Create and revoke keys."""

    def includes(self, other: Scope) -> bool:
        order = list(Scope)
        return order.index(self) >= order.index(other)


_NOTHING = "\n"
"""A prefix that no name has."""


BUILT_IN = "orchestrator."
"""The prefix of the built-in tasks that every worker can run, such as `orchestrator.webhook`."""


class KeyScope(NamedTuple):
    """The queues, workflows and tasks that a key may access, as prefixes of their names."""

    queues: str = ""
    workflows: str = ""
    tasks: tuple[str, ...] = ()
    """Prefixes of the tasks that may be enqueued. Empty for all tasks."""

    @classmethod
    def of(cls, queues: str | None, workflows: str | None, tasks: str | None = None) -> KeyScope:
        """Return the scope of a key. A key with only queues has access to no workflow, and vice versa."""
        named = tuple(tasks.split(",")) if tasks else ()
        if queues is None and workflows is None:
            return cls(tasks=named)
        return cls(_NOTHING if queues is None else queues, _NOTHING if workflows is None else workflows, named)

    @property
    def is_bound(self) -> bool:
        """Return whether the key is restricted at all."""
        return bool(self.queues or self.workflows or self.tasks)

    def has_task(self, name: str) -> bool:
        """Return whether the key may enqueue a task."""
        return not self.tasks or name.startswith(self.tasks)

    def grants(self, name: str) -> bool:
        """Return whether the key names a built-in task explicitly. No other permission includes built-in tasks."""
        return any(name.startswith(prefix) for prefix in self.tasks if prefix.startswith(BUILT_IN))

    def has_queue(self, name: str) -> bool:
        return name.startswith(self.queues)

    def has_workflow(self, name: str | None) -> bool:
        """Return whether the key may access a workflow. Runs without a workflow need a key for all workflows."""
        return (name or "").startswith(self.workflows)


class Secret(NamedTuple):
    """A key, split into its id and its secret."""

    id: str
    secret: str

    def __str__(self) -> str:
        return f"{_PREFIX}_{self.id}_{self.secret}"

    @property
    def hash(self) -> bytes:
        """The stored hash. SHA-256 is enough, because the secret is random and cannot be guessed."""
        return hashlib.sha256(self.secret.encode()).digest()


class Ticket(NamedTuple):
    """A session token of 256 random bits. The browser sends it after log-in instead of the key."""

    text: str

    @property
    def hash(self) -> bytes:
        return hashlib.sha256(self.text.encode()).digest()

    @property
    def id(self) -> str:
        return self.hash.hex()

    @property
    def form_token(self) -> str:
        """The CSRF token for forms of this session. The ticket cannot be derived from it."""
        return hashlib.sha256(f"form {self.text}".encode()).hexdigest()


def parse_ticket(text: str) -> Ticket | None:
    return Ticket(text) if _TICKET.fullmatch(text) else None


def parse(text: str) -> Secret | None:
    """Return the key in a text, or None if the text is not a key."""
    match = _KEY.fullmatch(text)
    return Secret(*match.groups()) if match else None


def masked(text: str) -> str:
    """Return the text with the secrets of all keys hidden."""
    return _KEY_LIKE.sub(rf"{_PREFIX}_\1_•••", text)


class Key(NamedTuple):
    id: str
    name: str
    hash: bytes
    scope: Scope
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    queues: str | None = None
    """The prefix of the queues that the key may access."""
    workflows: str | None = None
    """The prefix of the workflows that the key may access."""
    tasks: str | None = None
    """The prefixes of the tasks that the key may enqueue, separated by commas."""
    quotas: Quotas = DEFAULTS
    """How much the key may request."""

    @property
    def key_scope(self) -> KeyScope:
        """The queues, workflows and tasks that the key may access: all, unless the key is restricted."""
        return KeyScope.of(self.queues, self.workflows, self.tasks)

    def is_of(self, secret: Secret) -> bool:
        """Return whether the secret belongs to this key, in constant time. Its validity is not checked."""
        return compare_digest(self.hash, secret.hash)

    def refusal(self, secret: Secret, now: datetime) -> str | None:
        """Return why the key does not authenticate its bearer, or None if it does."""
        return self.fault(now) if self.is_of(secret) else "no such key"

    def fault(self, now: datetime) -> str | None:
        """Return why the key is invalid, or None if it is valid."""
        if self.revoked_at is not None:
            return "the key was revoked"
        if self.expires_at is not None and self.expires_at <= now:
            return "the key has expired"
        return None
