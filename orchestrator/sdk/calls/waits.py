"""A long poll for the ends of many tasks and runs: it is answered when the first of them have ended."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from orchestrator.domain.tasks.task import Id, TaskError

MISSING = "missing"
"""Stands for the state of what there is not."""
MOST_AT_ONCE = 5_000
"""Ids of one question."""
LONGEST = 60.0
"""Seconds that it may wait."""
PATH = "/api/v1/waits"

_Ids = Annotated[list[Id], Meta(max_length=MOST_AT_ONCE)]


class Waiting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The tasks and runs to wait for. Ids are 16 bytes in Base64."""

    tasks: _Ids = []
    runs: _Ids = []
    """Runs of any kind."""
    code: _Ids = []
    """Runs of workflows as code, whose results are told too."""
    timeout: Annotated[float, Meta(ge=0, le=LONGEST)] = 20.0
    """Seconds after which the answer is that there is none."""


class End(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of a task or run; also that there is none of this id."""

    id: Id
    state: str
    result: bytes | None = None
    """The encoded result, in Base64."""
    error: TaskError | None = None
    """The error; of a run of code that succeeded, that it goes on in another one."""


class Ends(msgspec.Struct, frozen=True):
    """The ends that have come by now."""

    ended: list[End]
