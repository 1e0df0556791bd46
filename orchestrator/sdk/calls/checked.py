"""Types of arguments with a check. The client checks before it sends a request, and the API checks again.

The API trusts no client. Arguments with a type of their own, such as tasks and definitions, are checked by type in
`api/client_checks.py`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from orchestrator.domain import timezones
from orchestrator.domain.dag.composed import check_composed
from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.plain import REFUSALS
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import InvalidTask, InvalidWorkflow, PayloadError
from orchestrator.references import may_hold_references
from orchestrator.sdk.checks import check_label, check_name, check_reason, check_retention, check_tags
from orchestrator.sdk.values.payload import decode_call, decode_value
from orchestrator.sealing import is_sealed
from orchestrator.settings import Settings

MAX_SECONDS = 100 * 365 * 86_400.0
"""Seconds of any duration, at most."""


@dataclass(frozen=True)
class Checked:
    """A check that raises for an invalid value. It does not run for None."""

    check: Callable[[Settings, Any, Mapping[str, Any]], object]
    """Receives the settings, the value, and all arguments of the call."""


def _named(what: str) -> Checked:
    return Checked(lambda _, value, __: check_name(what, value))


def _labelled(what: str) -> Checked:
    return Checked(lambda _, value, __: check_label(what, value))


def _retention(which: str) -> Checked:
    return Checked(lambda _, value, __: check_retention(which, value))


def _within(what: str, minimum: float, maximum: float, expected: str) -> Checked:
    def check(_: Settings, value: float, __: Mapping[str, Any]) -> None:
        if not minimum <= value <= maximum:
            raise InvalidTask(f"{what}: expected {expected}, found {value!r}.")

    return Checked(check)


def encoded_value(what: str) -> Checked:
    """Check an encoded value. `what` names it in errors, with arguments of the call in braces."""
    return Checked(lambda settings, data, arguments: check_value(settings, what.format(**arguments), data))


def encoded_call(what: str) -> Checked:
    """Check encoded arguments. `what` names them in errors, with arguments of the call in braces."""
    return Checked(lambda settings, data, arguments: check_call(settings, what.format(**arguments), data))


def check_call(settings: Settings, what: str, data: bytes) -> None:
    """Refuse encoded arguments that are too large or cannot be decoded. Sealed arguments are not decoded."""
    if not _is_plain(settings, what, data):
        return
    try:
        arguments, keywords, *_ = decode_call(data)
    except (*REFUSALS, StopIteration) as error:
        raise PayloadError(f"{what} cannot be read: {error}.") from None
    is_text = isinstance(keywords, dict) and all(isinstance(name, str) for name in keywords)
    if not isinstance(arguments, list) or not is_text:
        raise PayloadError(f"{what}: expected positional ones and those by name.")


def check_value(settings: Settings, what: str, data: bytes) -> None:
    """Refuse an encoded value that is too large or cannot be decoded."""
    if not _is_plain(settings, what, data):
        return
    try:
        decode_value(data)
    except REFUSALS as error:
        raise PayloadError(f"{what} cannot be read: {error}.") from None


def _is_plain(settings: Settings, what: str, data: bytes) -> bool:
    """Return whether data is not sealed. Refuse data that is too large or has references to stored payloads.

    A client over HTTP does not write into the payload store, so it has nothing to refer to.
    """
    if len(data) > settings.max_payload:
        raise PayloadError(
            f"{what}: {len(data):,} bytes, and at most {settings.max_payload:,} are allowed. Pass a reference to the "
            f"data instead, or raise the setting max_payload of the API."
        )
    if may_hold_references(data):
        raise PayloadError(f"{what} cannot be read: it names a stored payload, which clients may not do.")
    return not is_sealed(data)


def _check_definitions(_: Settings, definitions: Sequence[Definition], __: Mapping[str, Any]) -> None:
    if not definitions:
        raise InvalidWorkflow("A composition has at least one definition.")
    for definition in definitions:
        check_composed(definition)


def _check_packed(settings: Settings, args: str, arguments: Mapping[str, Any]) -> None:
    what = f"The arguments of composition {arguments['name']!r:.200}"
    try:
        data = base64.b64decode(args, validate=True)
        if _is_plain(settings, what, data):
            timezones.decode(data)
    except REFUSALS as error:
        raise PayloadError(f"{what} cannot be read: {error}.") from None


def _distinct(_: Settings, tasks: Sequence[NewTask], __: Mapping[str, Any]) -> None:
    if len({task.id for task in tasks}) < len(tasks):
        raise InvalidTask("Two of these tasks have the same id.")


def decoded(text: str | bytes, kind: type[Any], what: str) -> Any:
    """Decode a JSON text into a type. Raise InvalidTask if it does not fit."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidTask(f"{what} cannot be read: {error}.") from None


Composed = Annotated[Sequence[Definition], Checked(_check_definitions)]
PackedArguments = Annotated[str, Checked(_check_packed)]
QueueName = Annotated[str, _named("queue")]
WorkflowName = Annotated[str, _named("workflow")]
RunName = Annotated[str, _named("run")]
EventName = Annotated[str, _named("event")]
SignalName = Annotated[str, _named("signal")]
PromiseName = Annotated[str, _named("promise")]
Rejection = Annotated[str, Checked(lambda _, text, __: check_reason(text))]
Label = Annotated[str, _labelled("name")]
Reason = Annotated[str, Checked(lambda _, text, __: check_label("reason", text) if text else None)]
Key = Annotated[str | None, _labelled("key")]
RunKey = Annotated[str | None, _labelled("run id")]
Tags = Annotated[Sequence[str], Checked(lambda _, tags, __: check_tags(tags))]
EncodedTags = Annotated[str, Checked(lambda _, text, __: check_tags(decoded(text, list, "The tags of a run")))]
Timeout = Annotated[float, _within("timeout", 0, MAX_SECONDS, "a number of seconds")]
Concurrency = Annotated[int | None, _within("Option concurrency", 1, 2**31 - 1, "a whole number above zero")]
SuccessRetention = Annotated[float | None, _retention("success")]
FailedRetention = Annotated[float | None, _retention("failed")]
Distinct = Checked(_distinct)
