"""A long poll for the ends of many tasks and runs. The server answers as soon as the first have ended."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from orchestrator.domain.tasks.task import Id, TaskError

MISSING = "missing"
"""The state of a task or run that does not exist."""
MAX_AT_ONCE = 5_000
"""Ids in one poll, at most."""
MAX_SECONDS = 60.0
"""Seconds of one poll, at most."""
PATH = "/api/v1/waits"

_Ids = Annotated[list[Id], Meta(max_length=MAX_AT_ONCE)]


class Waiting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The tasks and runs to wait for. Ids are 16 bytes in Base64."""

    tasks: _Ids = []
    runs: _Ids = []
    """Runs of any kind."""
    code: _Ids = []
    """Runs of workflows as code. Their ends include the results."""
    timeout: Annotated[float, Meta(ge=0, le=MAX_SECONDS)] = 20.0
    """Seconds after which the server answers without any end."""


class End(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of a task or run, or the information that the id does not exist."""

    id: Id
    state: str
    result: bytes | None = None
    """The encoded result, in Base64."""
    error: TaskError | None = None
    """The error. With the state `success`, it means that a run of code has continued as another run."""


class Ends(msgspec.Struct, frozen=True):
    """The ends so far."""

    ended: list[End]
