"""A request to a service, as a call of a task's function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from orchestrator.sdk.tasks.task import Task


class ServiceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request."""

    input: Any = None
    params: dict[str, Any] = {}
    request_id: str = ""
    """The same for the same work: it is done once, however often it is asked for."""
    arguments: list[Any] | None = None
    """By place, where there is more than one of them."""


def as_call(task: Task[..., Any], request: ServiceRequest) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of the function, in its types.

    A parameter that is called `input` or `params` takes that as it is. Without an `input`, named values are bound by
    name, of the params too, where they fit; anything else is the first argument, if there is one.
    """
    signature, given = task._signature, request.input
    names = signature.names
    arguments = list(request.arguments or ())
    keywords: dict[str, Any] = {}
    if "input" in names:
        keywords = {"input": given}
    elif isinstance(given, Mapping):
        keywords = signature.pick({**request.params, **given})
    elif not arguments and given is not None and (free := [name for name in names if name != "params"]):
        keywords = {free[0]: given}
    if "params" in names:
        keywords["params"] = request.params
    elif not isinstance(given, Mapping) or "input" in names:
        taken = {*names[: len(arguments)], *keywords}
        more = signature.pick({name: value for name, value in request.params.items() if name in names})
        keywords |= {name: value for name, value in more.items() if name not in taken}
    return signature.restore(arguments, keywords)
