"""Failed tasks tried again by the thousand, after a look at how many that is."""

from __future__ import annotations

from datetime import datetime

import msgspec

from orchestrator.api.context import Api
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import WITHIN
from orchestrator.api.problems import refused
from orchestrator.domain.access import KeyScope
from orchestrator.store.tasks.redrive import FailedFilter

routes = Routes("tasks", "/api/v1/tasks")


class Redrive(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which failed tasks are opened again; what is not given does not matter."""

    queue: str | None = None
    name: str | None = None
    error: str | None = None
    """Part of the error's type or message."""
    kind: str | None = None
    """The error's type, and nothing else."""
    since: datetime | None = None
    until: datetime | None = None
    dry_run: bool = False
    """Only say which."""


class FailureGroup(msgspec.Struct, frozen=True):
    """Failed tasks of one name with one kind of error."""

    name: str
    queue: str
    kind: str
    example: str
    """The message of the last of them."""
    tasks: int


class Redriven(msgspec.Struct, frozen=True):
    """Failed tasks that match."""

    tasks: int
    groups: list[FailureGroup]
    asked: bool
    """Whether they are opened again, or this was only a look."""


@routes.post(
    "/retry",
    about=WITHIN,
    status=202,
    examples=[{"queue": "mail", "error": "ConnectionError", "dry_run": True}],
    is_expensive=True,
)
def retry_failed(api: Api, body: Redrive, key_scope: KeyScope) -> Redriven:
    """Open failed tasks again by the thousand: those of a queue, a name, an error or a time."""
    given = {name: getattr(body, name) for name in ("queue", "name", "error", "since", "until", "kind")}
    wanted = FailedFilter(**given)
    if wanted == FailedFilter():
        raise refused(422, "The request does not fit", "Say which: queue, name, error, kind, since or until.")
    groups = api.backend.tasks.preview_retry(wanted, key_scope.queues)
    asked = not body.dry_run and bool(groups)
    if asked:
        api.backend.tasks.retry_failed(wanted, key_scope.queues)
    found = [FailureGroup(*group) for group in groups]
    return Redriven(sum(group.tasks for group in groups), found, asked)
