"""Errors as problem details (RFC 9457), which name the field and the expected value."""

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
from orchestrator.store import postgres_errors
from orchestrator.transport import connection as transport

MEDIA_TYPE = "application/problem+json"
_RETRY_AFTER = 2
"""Seconds after which a rejected client may retry."""


class FieldError(msgspec.Struct, frozen=True):
    """A problem of one part of a request."""

    pointer: str
    """`#/priority` in the body, `?limit` in the query."""
    detail: str


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A description of an error."""

    title: str
    """The kind of problem; the same words for the same kind."""
    status: int
    detail: str = ""
    """What happened this time, and what to do."""
    type: str = "about:blank"
    """A stable name of the kind: `urn:orchestrator:error:WrongState`."""
    errors: list[FieldError] = []
    task_id: str | None = None
    """The task that has the unique key, if that is the problem."""
    data: dict[str, Any] = {}


class Refused(Exception):
    """Raised to respond with a problem."""

    def __init__(self, problem: Problem, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(problem.detail)
        self.problem = problem
        self.headers = dict(headers or {})


def refused(status: int, title: str, detail: str = "", **fields: Any) -> Refused:
    """Return a problem to raise, with `Retry-After` for 429 and 503."""
    headers = {"Retry-After": str(_RETRY_AFTER)} if status in (429, 503) else {}
    return Refused(Problem(title=title, status=status, detail=detail, **fields), headers)


def invalid(detail: str, **fields: Any) -> Refused:
    """Return a problem for a request with invalid content."""
    return refused(422, "The request does not fit", detail, **fields)


def at(pointer: str, error: Exception) -> Refused:
    """Return the problem of an error in one part of a request."""
    refusal = from_error(error)
    assert refusal is not None, "the error is an expected one"
    detail = refusal.problem.detail
    problem = msgspec.structs.replace(
        refusal.problem, detail=f"{pointer}: {detail}", errors=[FieldError(pointer, detail)]
    )
    return Refused(problem, refusal.headers)


_AT = re.compile(r"(?s)(?P<detail>.*?)(?: - at `(?P<where>.*)`)?$")


def invalid_field(error: msgspec.ValidationError, mark: str = "#/") -> Refused:
    """Return the problem of a request that does not match its type. `?` as `mark` is for parts of the query."""
    match = _AT.match(str(error))
    detail, where = (match["detail"], match["where"] or "$") if match else (str(error), "$")
    path = re.findall(r"[^.\[\]$]+", where.removeprefix("key in "))
    unknown = re.search(r"unknown field `(.+?)`|missing required field `(.+?)`", detail)
    if unknown:
        path.append(unknown[1] or unknown[2])
    pointer = f"{mark}{'/'.join(path)}"
    return invalid(f"{pointer}: {detail}", errors=[FieldError(pointer, detail)])


_STATUSES: tuple[tuple[type[Exception], int, str], ...] = (
    (Forbidden, 403, "The key does not allow this"),
    (NotFound, 404, "The resource was not found"),
    (Duplicate, 409, "The key is in use"),
    (WrongState, 409, "The state does not allow this"),
    (StateTooLarge, 413, "The state of the run is too large"),
    (InvalidTask, 422, "It cannot be accepted"),
    (InvalidWorkflow, 422, "The workflow cannot be accepted"),
    (ResultTimeout, 409, "There was no answer in time"),
    (Unavailable, 503, "The database or the payload store is unavailable"),
    (Uncertain, 503, "The outcome is unknown"),
    (ConfigurationError, 503, "The server is not ready"),
    (OrchestratorError, 400, "The request cannot be fulfilled"),
)


def from_error(error: Exception) -> Refused | None:
    """Return the problem of an expected error or an outage; None for a defect."""
    if isinstance(error, Refused):
        return error
    for kind, status, title in _STATUSES:
        if isinstance(error, kind):
            if isinstance(error, Unavailable) and postgres_errors.is_exhausted(error):
                return refused(429, "Postgres has no free connection", str(error))
            assert isinstance(error, OrchestratorError), "all these types are"
            task_id = error.task_id or None if isinstance(error, Duplicate) else None
            name, data = to_problem(error)
            return refused(status, title, str(error), task_id=task_id, type=name, data=data)
    if isinstance(error, transport.UNAVAILABLE):
        return refused(503, "Redis is unavailable", transport.describe(error))
    if "cannot contain NUL" in str(error):
        return invalid("A string contains a NUL character, which cannot be stored or searched for: remove it.")
    if isinstance(error, exc.DataError):
        return invalid(f"A value cannot be stored or searched for: {postgres_errors.error_line(error)}")
    return None
