"""Form fields for typed values: parameters of workflows and tasks, and values of promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from orchestrator.domain.dag.definition import Param, ParamType, mismatch
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
"""Shown for a default value that workers do not announce."""
_KINDS: dict[tuple[str, str], ParamType] = {
    **{(name, ""): name for name in ("string", "integer", "number", "boolean", "object")},
    ("array", ""): "list",
    ("string", "date"): "date",
    ("string", "date-time"): "datetime",
}
"""Field kinds by type and format of JSON Schema."""


@dataclass(frozen=True, kw_only=True)
class Field:
    name: str = ""
    """The name; empty if the form has a single value."""
    kind: ParamType = "any"
    type: str = ""
    """The type as it is displayed."""
    required: bool = True
    default: Any = UNSET
    description: str = ""
    choices: tuple[Any, ...] = ()
    empty: str = ""
    """The JSON that is sent for an empty field; if empty, the value is omitted."""
    value: Any = UNSET
    """The initial value."""

    @property
    def json(self) -> str:
        """The initial value as JSON."""
        return "" if self.value is UNSET else encoded(self.value)

    @property
    def text(self) -> str:
        """The initial value as a user would type it."""
        if self.value is UNSET or (self.value is None and self.kind != "any"):
            return ""
        is_plain = isinstance(self.value, str) and self.kind != "any"
        return self.value if is_plain else msgspec.json.format(self.json, indent=2)

    @property
    def placeholder(self) -> str:
        has_default = not self.required and self.default is not UNSET
        return (self.default if self.default == UNKNOWN else encoded(self.default)) if has_default else ""

    @property
    def options(self) -> list[tuple[str, str]]:
        """The choices as JSON, with their labels."""
        choices = self.choices or ((True, False) if self.kind == "boolean" else ())
        return [(encoded(choice), _LABELS.get(encoded(choice), str(choice))) for choice in choices]


_LABELS = {"true": "yes (true)", "false": "no (false)", "null": "none (null)"}


def encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def of_params(params: Mapping[str, Param], values: Mapping[str, Any] | None = None) -> list[Field]:
    """Return the fields of a definition's parameters, filled if values are given; required ones first."""
    fields = []  # sorted, because Postgres does not keep the order of the definition
    for name, param in sorted(params.items(), key=lambda param: not param[1].required):
        value = UNSET if values is None else values.get(name, UNSET)
        fields.append(
            Field(
                name=name,
                kind=param.type if _is_editable(param.type, value) else "any",
                type=param.type,
                required=param.required,
                default=param.default,
                description=param.description,
                empty='""' if param.type == "string" and isinstance(value, str) else "",
                value=value,
            )
        )
    return fields


def _is_editable(kind: ParamType, value: Any) -> bool:
    """Return whether a value, if any, can be edited in a field of this kind; a redacted value cannot."""
    return value is UNSET or value is None or mismatch(kind, value) is None


def of_parameters(parameters: Sequence[Parameter], values: Mapping[str, Any] | None = None) -> list[Field]:
    """Return the fields of parameters that workers announced, filled if values are given.

    A value that does not match its type gets a JSON field.
    """
    fields = []
    for parameter in parameters:
        is_many = parameter.kind == "variadic positional"
        if parameter.kind == "variadic keyword" or (is_many and values is None):
            continue
        value = UNSET if values is None else values.get(parameter.name, UNSET)
        kind = "list" if is_many else _kind_of(parameter.type)
        may_be_null = parameter.type.endswith(_NULLABLE) and not parameter.optional
        fields.append(
            Field(
                name=parameter.name,
                kind=kind if _is_editable(kind, value) else "any",
                type=f"any number of {parameter.type}" if is_many and parameter.type else parameter.type,
                required=not (parameter.optional or is_many),
                default=UNKNOWN if parameter.optional and parameter.default is UNSET else parameter.default,
                empty="null" if may_be_null else '""' if kind == "string" and isinstance(value, str) else "",
                value=value,
            )
        )
    return fields


def _kind_of(type: str) -> ParamType:
    """Return the field kind of an annotation; `dict[str, int]` is treated as `dict`."""
    plain = type.removesuffix(_NULLABLE)
    return _TYPES.get(plain if " | " in plain else plain.partition("[")[0], "any")


def mismatch_of(parameter: Parameter, value: Any) -> str | None:
    """Return why a value does not match a parameter's annotation, as far as the annotation tells; None if it does."""
    if value is None and (parameter.type.endswith(_NULLABLE) or parameter.default is None):
        return None
    return None if parameter.kind.startswith("variadic") else mismatch(_kind_of(parameter.type), value)


def of_schema(schema: dict[str, Any] | None) -> list[Field]:
    """Return the fields of a value with a JSON Schema: one per property of an object, or a single unnamed field.

    Empty if only JSON can express all values.
    """
    root = schema or {}
    defs = root.get("$defs", {})
    kind, may_be_null = _resolved(root, defs)
    if kind.get("properties") and not may_be_null:
        required = kind.get("required", ())
        return [_of_property(name, property, defs, name in required) for name, property in kind["properties"].items()]
    field = _of_property("", root, defs, True)
    is_plain = field.options or (field.kind not in ("any", "list", "object") and not may_be_null)
    return [field] if is_plain else []


def _resolved(schema: dict[str, Any], defs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the schema that a reference or an optional type stands for, and whether the value may be null."""
    if "$ref" in schema:
        return defs.get(schema["$ref"].rpartition("/")[2], {}) | schema, False
    kinds = [option for option in schema.get("anyOf", ()) if option != {"type": "null"}]
    if len(kinds) == 1:
        return _resolved(kinds[0], defs)[0] | schema, len(schema["anyOf"]) > 1
    return schema, False


def _of_property(name: str, schema: dict[str, Any], defs: dict[str, Any], is_required: bool) -> Field:
    resolved, may_be_null = _resolved(schema, defs)
    kind = _KINDS.get((str(resolved.get("type", "")), resolved.get("format", "")), "any")
    choices = tuple(resolved.get("enum", (True, False) if kind == "boolean" else ()))
    return Field(
        name=name,
        kind=kind,
        type="" if choices else kind,
        required=is_required and not may_be_null,
        default=resolved.get("default", UNSET),
        description=resolved.get("description", ""),
        choices=(*choices, None) if choices and may_be_null and None not in choices else choices,
        empty="null" if may_be_null and is_required else "",
    )
