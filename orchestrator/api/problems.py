"""Errors as answers: problem details (RFC 9457) that name the field and say what was expected."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import exc

from orchestrator.errors import (
    ConfigurationError,
    Duplicate,
    Forbidden,
    InvalidTask,
    InvalidWorkflow,
    NotFound,
    OrchestratorError,
    ResultTimeout,
    StateTooLarge,
    Unavailable,
    Uncertain,
    WrongState,
    to_problem,
)
from orchestrator.store import database
from orchestrator.transport import connection as transport

MEDIA_TYPE = "application/problem+json"
_RETRY_AFTER = 2
"""Seconds after which a refused client may try again."""


class FieldError(msgspec.Struct, frozen=True):
    """A problem of one part of a request."""

    pointer: str
    """Where: `#/priority` in the body, `?limit` in the address."""
    detail: str
    """The expected and the found value."""


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """An answer that says what went wrong."""

    title: str
    """The kind of the problem; the same words for the same kind."""
    status: int
    detail: str = ""
    """What happened this time, and what to do."""
    type: str = "about:blank"
    """The kind again, as a name that stays: `urn:orchestrator:error:WrongState`."""
    errors: list[FieldError] = []
    """The parts of the request that are at fault."""
    task_id: str | None = None
    """The task that has the key, if that is the problem."""
    data: dict[str, Any] = {}
    """Further members for programs."""


class Refused(Exception):
    """Raised to answer with a problem."""

    def __init__(self, problem: Problem, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(problem.detail)
        self.problem = problem
        self.headers = dict(headers or {})


def refused(status: int, title: str, detail: str = "", **fields: Any) -> Refused:
    """Return a refusal; what is busy or away says when to come again."""
    headers = {"Retry-After": str(_RETRY_AFTER)} if status in (429, 503) else {}
    return Refused(Problem(title=title, status=status, detail=detail, **fields), headers)


def unfit(detail: str, **fields: Any) -> Refused:
    """Return a refusal of a request that does not fit."""
    return refused(422, "The request does not fit", detail, **fields)


def at(pointer: str, error: Exception) -> Refused:
    """Return what to say of one part of a request that something is wrong with."""
    found = of_error(error)
    assert found is not None, "it was raised on purpose"
    detail = found.problem.detail
    problem = msgspec.structs.replace(
        found.problem, detail=f"{pointer}: {detail}", errors=[FieldError(pointer, detail)]
    )
    return Refused(problem, found.headers)


_AT = re.compile(r"(?s)(?P<detail>.*?)(?: - at `(?P<where>.*)`)?$")


def misfit(error: msgspec.ValidationError, mark: str = "#/") -> Refused:
    """Return what to say of a request that does not fit its type; `?` marks the parts of an address."""
    found = _AT.match(str(error))
    detail, where = (found["detail"], found["where"] or "$") if found else (str(error), "$")
    path = re.findall(r"[^.\[\]$]+", where.removeprefix("key in "))
    unknown = re.search(r"unknown field `(.+?)`|missing required field `(.+?)`", detail)
    if unknown:
        path.append(unknown[1] or unknown[2])
    pointer = f"{mark}{'/'.join(path)}"
    return unfit(f"{pointer}: {detail}", errors=[FieldError(pointer, detail)])


_KINDS: tuple[tuple[type[Exception], int, str], ...] = (
    (Forbidden, 403, "The key may not do this"),
    (NotFound, 404, "It was not found"),
    (Duplicate, 409, "The key is taken"),
    (WrongState, 409, "It is not in a state for this"),
    (StateTooLarge, 413, "The run cannot keep more"),
    (InvalidTask, 422, "It cannot be accepted"),
    (InvalidWorkflow, 422, "The workflow cannot be accepted"),
    (ResultTimeout, 409, "It was not answered in time"),
    (Unavailable, 503, "The database or the payload store cannot be used now"),
    (Uncertain, 503, "It is not known whether it was done"),
    (ConfigurationError, 503, "The server is not ready"),
    (OrchestratorError, 400, "It cannot be done"),
)


def of_error(error: Exception) -> Refused | None:
    """Return what to answer where something was raised on purpose, or something is away; None for a defect."""
    if isinstance(error, Refused):
        return error
    for kind, status, title in _KINDS:
        if isinstance(error, kind):
            if isinstance(error, Unavailable) and database.is_exhausted(error):
                return refused(429, "Postgres has no connection left", str(error))
            assert isinstance(error, OrchestratorError), "so are all these kinds"
            task_id = error.task_id or None if isinstance(error, Duplicate) else None
            name, data = to_problem(error)
            return refused(status, title, str(error), task_id=task_id, type=name, data=data)
    if isinstance(error, transport.UNAVAILABLE):
        return refused(503, "Redis cannot be used now", transport.describe(error))
    if "cannot contain NUL" in str(error):
        return unfit("A text contains a NUL character, which cannot be stored or looked for: remove it.")
    if isinstance(error, exc.DataError):
        return unfit(f"A value cannot be stored or looked for: {database.said(error)}")
    return None
