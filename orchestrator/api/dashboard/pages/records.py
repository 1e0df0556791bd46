"""The audit log, and keys."""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard.rendering import Note, page, page_actions, pages
from orchestrator.api.key_scope import WHOLE
from orchestrator.api.redacting import redacted
from orchestrator.api.routes import system as audit_routes
from orchestrator.domain.access import Key, Scope, Secret
from orchestrator.domain.quotas import DEFAULTS, Quotas, parse_quotas
from orchestrator.errors import NotFound
from orchestrator.monitoring.times import present
from orchestrator.sdk.checks import check_label, check_name
from orchestrator.store import keys

routes, actions = pages("/ui"), page_actions("/ui")


@routes.get("/audit", about=WHOLE, scope=Scope.ADMIN)
def show_audit(api: Api, query: audit_routes.AuditQuery) -> Response:
    """Show the audit log."""
    found = redacted(api, audit_routes.list_audit(api, query))
    return page("audit.html", query=query, found=found)


@routes.get("/keys", about=WHOLE, scope=Scope.ADMIN)
def show_keys(api: Api) -> Response:
    """Show the keys and their permissions."""
    return _keys(api)


def _keys(api: Api, made: Key | None = None, secret: Secret | None = None) -> Response:
    found = api.read(keys.list_all)
    return page(
        "keys.html", usual=_quotas(DEFAULTS), quotas=_quotas, keys=found, made=made, secret=secret, scopes=list(Scope)
    )


def _quotas(quotas: Quotas) -> list[tuple[str, str, bool]]:
    """Return quotas as text, and whether each differs from its default."""
    values = msgspec.structs.asdict(quotas)
    return [
        (name, f"{value:,g}" if isinstance(value, float) else f"{value:,}", value != getattr(DEFAULTS, name))
        for name, value in values.items()
    ]


class NewKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key to create."""

    name: str
    scope: Scope = Scope.ENQUEUE
    days: Annotated[int, Meta(ge=1, le=36_500)] | None = None
    """The days until the key expires; without a number it never does."""
    queues: str | None = None
    """The prefix of the queues that the key is bound to."""
    workflows: str | None = None
    """The prefix of the workflows that the key is bound to."""
    tasks: str | None = None
    """Prefixes of the tasks that the key may enqueue, separated by commas."""
    quotas: str | None = None
    """Quotas that differ from the defaults: `rate=10, priority=0`."""


@actions.post("/keys", about=WHOLE, scope=Scope.ADMIN)
def create_key(api: Api, body: NewKey) -> Response:
    """Create a key, and show it once: only its hash is stored."""
    label = check_label("name", body.name)
    for noun, prefix in (("queues", body.queues), ("workflows", body.workflows)):
        if prefix:
            check_name(noun, prefix)
    quotas = parse_quotas(word for word in (body.quotas or "").split(",") if word.strip())
    secret = Secret(secrets.token_hex(6), secrets.token_urlsafe(32))
    until = None if body.days is None else present() + timedelta(days=body.days)
    tasks = [check_name("tasks", one.strip()) for one in (body.tasks or "").split(",") if one.strip()]
    bounds = {"queues": body.queues, "workflows": body.workflows, "tasks": ",".join(tasks) or None}
    connections = api.backend.connections
    with connections.writing("the key was stored", transaction=True) as connection:
        made = keys.add(connection, secret, label, body.scope, until, **bounds, quotas=quotas)
        detail = bounds | {"quotas": body.quotas}
        connections.record(connection, "create", "key", made.id, name=label, scope=str(body.scope), **detail)
    return _keys(api, made, secret)


class OneKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key to revoke."""

    id: str


@actions.post("/keys/revoke", about=WHOLE, scope=Scope.ADMIN)
def revoke_key(api: Api, body: OneKey) -> Note:
    """Revoke a key. Servers reject it within a second."""
    connections = api.backend.connections
    with connections.writing("the key was revoked", transaction=True) as connection:
        if not keys.revoke(connection, body.id):
            raise NotFound(f"There is no key {body.id!r:.60}.")
        connections.record(connection, "revoke", "key", body.id)
    return Note("the key was revoked")
