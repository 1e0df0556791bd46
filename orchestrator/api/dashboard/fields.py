"""Fields of forms for values with a type: parameters of workflows and tasks, and values of promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from orchestrator.domain.dag.definition import Param, ParamType, misfit
from orchestrator.domain.tasks.parameters import Parameter

_TYPES: dict[str, ParamType] = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "date": "date",
    "datetime": "datetime",
    "dict": "object",
    "list": "list",
}
_NULLABLE = " | None"
UNKNOWN = "…"
"""Stands for a default that workers do not announce."""
_KINDS: dict[tuple[str, str], ParamType] = {
    **{(name, ""): name for name in ("string", "integer", "number", "boolean", "object")},
    ("array", ""): "list",
    ("string", "date"): "date",
    ("string", "date-time"): "datetime",
}
"""Types of JSON Schema, with their formats."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One value of a form."""

    name: str = ""
    """Empty for a value that is all of the form."""
    kind: ParamType = "any"
    type: str = ""
    """The type as people read it."""
    required: bool = True
    default: Any = UNSET
    description: str = ""
    choices: tuple[Any, ...] = ()
    empty: str = ""
    """What is sent if nothing is typed, as JSON; nothing: the value is left out."""
    value: Any = UNSET
    """What stands in it before somebody types."""

    @property
    def json(self) -> str:
        """The value that it begins with, as JSON."""
        return "" if self.value is UNSET else encoded(self.value)

    @property
    def text(self) -> str:
        """The value that it begins with, as somebody would type it."""
        if self.value is UNSET or (self.value is None and self.kind != "any"):
            return ""
        is_plain = isinstance(self.value, str) and self.kind != "any"
        return self.value if is_plain else msgspec.json.format(self.json, indent=2)

    @property
    def placeholder(self) -> str:
        """The default, as JSON."""
        is_given = not self.required and self.default is not UNSET
        return (self.default if self.default == UNKNOWN else encoded(self.default)) if is_given else ""

    @property
    def options(self) -> list[tuple[str, str]]:
        """The values to choose from, as JSON, with their labels."""
        choices = self.choices or ((True, False) if self.kind == "boolean" else ())
        return [(encoded(one), _LABELS.get(encoded(one), str(one))) for one in choices]


_LABELS = {"true": "yes (true)", "false": "no (false)", "null": "none (null)"}


def encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def of_params(params: Mapping[str, Param], values: Mapping[str, Any] | None = None) -> list[Field]:
    """Return the fields of parameters that a definition declares, filled if values are given; required ones first."""
    found = []  # Postgres does not keep the order in which a definition names them
    for name, one in sorted(params.items(), key=lambda param: not param[1].required):
        value = UNSET if values is None else values.get(name, UNSET)
        found.append(
            Field(
                name=name,
                kind=one.type if _is_fit(one.type, value) else "any",
                type=one.type,
                required=one.required,
                default=one.default,
                description=one.description,
                empty='""' if one.type == "string" and isinstance(value, str) else "",
                value=value,
            )
        )
    return found


def _is_fit(kind: ParamType, value: Any) -> bool:
    """Say whether a value, if there is one, can stand in a field of a type; a hidden one, for example, cannot."""
    return value is UNSET or value is None or misfit(kind, value) is None


def of_parameters(parameters: Sequence[Parameter], values: Mapping[str, Any] | None = None) -> list[Field]:
    """Return the fields of parameters that workers announce, filled if values are given.

    A value that does not fit its type has a field for JSON.
    """
    found = []
    for one in parameters:
        is_many = one.kind == "variadic positional"
        if one.kind == "variadic keyword" or (is_many and values is None):
            continue
        value = UNSET if values is None else values.get(one.name, UNSET)
        kind = "list" if is_many else _kind_of(one.type)
        may_be_null = one.type.endswith(_NULLABLE) and not one.optional
        found.append(
            Field(
                name=one.name,
                kind=kind if _is_fit(kind, value) else "any",
                type=f"any number of {one.type}" if is_many and one.type else one.type,
                required=not (one.optional or is_many),
                default=UNKNOWN if one.optional and one.default is UNSET else one.default,
                empty="null" if may_be_null else '""' if kind == "string" and isinstance(value, str) else "",
                value=value,
            )
        )
    return found


def _kind_of(type: str) -> ParamType:
    """Return the kind of an annotation; that of `dict[str, int]` is that of `dict`."""
    plain = type.removesuffix(_NULLABLE)
    return _TYPES.get(plain if " | " in plain else plain.partition("[")[0], "any")


def misfit_of(one: Parameter, value: Any) -> str | None:
    """Return why a value is not of the type of a parameter, as far as its annotation says."""
    if value is None and (one.type.endswith(_NULLABLE) or one.default is None):
        return None
    return None if one.kind.startswith("variadic") else misfit(_kind_of(one.type), value)


def of_schema(schema: dict[str, Any] | None) -> list[Field]:
    """Return the fields of a value with a JSON Schema: one for each property of an object, or else one without a name.

    Nothing where only JSON can say all that the value may be.
    """
    whole = schema or {}
    defs = whole.get("$defs", {})
    kind, may_be_null = _resolved(whole, defs)
    if kind.get("properties") and not may_be_null:
        required = kind.get("required", ())
        return [_of_property(name, one, defs, name in required) for name, one in kind["properties"].items()]
    field = _of_property("", whole, defs, True)
    is_plain = field.options or (field.kind not in ("any", "list", "object") and not may_be_null)
    return [field] if is_plain else []


def _resolved(schema: dict[str, Any], defs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return what a schema refers to, and whether it may also be null."""
    if "$ref" in schema:
        return defs.get(schema["$ref"].rpartition("/")[2], {}) | schema, False
    kinds = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if len(kinds) == 1:
        return _resolved(kinds[0], defs)[0] | schema, len(schema["anyOf"]) > 1
    return schema, False


def _of_property(name: str, schema: dict[str, Any], defs: dict[str, Any], is_required: bool) -> Field:
    found, may_be_null = _resolved(schema, defs)
    kind = _KINDS.get((str(found.get("type", "")), found.get("format", "")), "any")
    choices = tuple(found.get("enum", (True, False) if kind == "boolean" else ()))
    return Field(
        name=name,
        kind=kind,
        type="" if choices else kind,
        required=is_required and not may_be_null,
        default=found.get("default", UNSET),
        description=found.get("description", ""),
        choices=(*choices, None) if choices and may_be_null and None not in choices else choices,
        empty="null" if may_be_null and is_required else "",
    )
