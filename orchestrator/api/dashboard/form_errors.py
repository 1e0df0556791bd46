"""Descriptions of invalid queries and forms, in the words of their page."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import inspect

from orchestrator.api.problems import Problem

_EXPECTED = re.compile(r"Expected `(\w+)( \| null)?`(?: of length)?(?: (>=|<=) (\S+?))?(?:, got .*)?")
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a different number of values",
}
_BOUNDS = {">=": "at least", "<=": "at most"}
_LABELS = {"status": "State", "since": "From", "until": "To", "span": "Time", "cursor": "Page", "run": "Run"}
"""The labels of filter fields, where they differ from the name."""
_GIVE = {
    "Invalid RFC3339": "a time, such as 2026-01-31T09:30Z",
    "Invalid UUID": "an id, such as 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17",
}


def describe_problem(problem: Problem, struct: type[msgspec.Struct] | None) -> str:
    """Return a description of the invalid fields of a form or query; other problems keep their detail."""
    messages = [
        text for error in problem.errors if (text := _describe(error.pointer.strip("#/?"), error.detail, struct))
    ]
    return " ".join(messages) or problem.detail.removeprefix("?: ")


def _describe(pointer: str, detail: str, struct: type[msgspec.Struct] | None) -> str:
    info = struct and inspect.type_info(struct)
    fields = {field.encode_name: field.type for field in info.fields} if isinstance(info, inspect.StructType) else {}
    name = pointer.partition("/")[0]
    label = _LABELS.get(name, pointer.replace("_", " ").replace("/", " ").capitalize())
    if "unknown field" in detail:
        filters = ", ".join(field for field in fields if field not in ("cursor", "limit"))
        return f"This page has no filter {name}. It has: {filters}." if filters else f"This page has no filter {name}."
    if "matching regex" in detail:
        return f"{label}: invalid value. Remove it."
    if name == "cursor":
        return "This page of the list does not exist: go to the first page."
    if choices := _choices(fields.get(name)) if "Invalid enum value" in detail else []:
        value = detail.removeprefix("Invalid enum value ")
        return f"{label}: {value} is not one of {', '.join(choices)}."
    if example := next((text for start, text in _GIVE.items() if detail.startswith(start)), ""):
        return f"{label}: give {example}."
    if match := _EXPECTED.fullmatch(detail):
        kind, or_none, bound, limit = match.groups()
        text = f"give {_KINDS.get(kind, 'a different value')}"
        unit = "" if kind != "str" else " character" if limit == "1" else " characters"
        text += f", {_BOUNDS[bound]} {limit}{unit}" if bound else ""
        return f"{label}: {text}{', or leave it empty' if or_none else ''}."
    return ""


def _choices(kind: Any) -> list[str]:
    """Return the values that a field accepts, if they are few."""
    match kind:
        case inspect.EnumType():
            return [str(one.value) for one in kind.cls]
        case inspect.LiteralType():
            return [str(value) for value in kind.values if value != ""]
        case inspect.ListType() | inspect.VarTupleType():
            return _choices(kind.item_type)
        case inspect.UnionType():
            return [choice for each in kind.types for choice in _choices(each)]
    return []
