"""Read typed values from a document. A value either fits its type, or is reported as a problem with its path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import msgspec

from orchestrator.domain.dag.checks import NAME
from orchestrator.domain.dag.expression import unwrap
from orchestrator.domain.dag.operators import describe, shortened
from orchestrator.domain.durations import DURATION, parse_duration
from orchestrator.domain.problems import MAX_PROBLEMS, Key, Path, Problem
from orchestrator.errors import InvalidWorkflow, did_you_mean
from orchestrator.sdk.dag.document import Entry, Flaw, Node


class Bad:
    """The type of `BAD`, which replaces an invalid value whose problem has been reported."""


BAD = Bad()


class Fields:
    """Reads a document and collects its problems."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def problem(self, path: Path, message: str) -> Bad:
        self.problems.append(Problem(path, message))
        return BAD

    def mismatch(self, node: Node, path: Path, expected: str) -> Bad:
        """Report that a value has the wrong type."""
        return self.problem(path, f"expected {expected}, found {describe(node.plain())}.")

    def mapping(self, node: Node, path: Path, expected: str) -> Mapping[str, Entry]:
        if isinstance(node.value, dict):
            return node.value
        self.mismatch(node, path, expected)
        return {}

    def read(self, node: Node, path: Path, expected: str, table: Table) -> dict[str, Any]:
        """Return the valid values of a mapping with known keys."""
        values: dict[str, Any] = {}
        for key, entry in self.mapping(node, path, expected).items():
            if key not in table:
                is_reported = len(self.problems) < MAX_PROBLEMS
                advice = (did_you_mean(key, table) or f" Known: {', '.join(table)}.") if is_reported else ""
                self.problem((*path, key), f"unknown key.{advice}")
                continue
            value = table[key].read(self, entry.node, (*path, key))
            if value is not BAD:
                values[key] = value
        return values


Convert = Callable[[Fields, Node, Path], Any]
Schema = dict[str, Any]
"""A JSON schema, for editors."""


class Field(NamedTuple):
    """The reader of a key's value, and its JSON schema."""

    read: Convert
    schema: Schema


Table = Mapping[str, Field]
"""The keys of a mapping, with their fields."""


def text(fields: Fields, node: Node, path: Path) -> str | Bad:
    return node.value if isinstance(node.value, str) else fields.mismatch(node, path, "a string")


def integer(fields: Fields, node: Node, path: Path) -> int | Bad:
    """Read a whole number."""
    if isinstance(node.value, int) and not isinstance(node.value, bool):
        return node.value
    return fields.mismatch(node, path, "a whole number")


def boolean(fields: Fields, node: Node, path: Path) -> bool | Bad:
    """Read true or false."""
    return node.value if isinstance(node.value, bool) else fields.mismatch(node, path, "true or false")


def anything(_fields: Fields, node: Node, _path: Path) -> Any:
    """Read any plain data."""
    return node.plain()


def plain_object(fields: Fields, node: Node, path: Path) -> dict[str, Any] | Bad:
    """Read a mapping of any plain data."""
    if isinstance(node.value, dict):
        plain: dict[str, Any] = node.plain()
        return plain
    return fields.mismatch(node, path, "a mapping")


def texts(fields: Fields, node: Node, path: Path) -> tuple[str, ...] | Bad:
    """Read a list of strings, or a single string."""
    if isinstance(node.value, str):
        return (node.value,)
    if not isinstance(node.value, list):
        return fields.mismatch(node, path, "a name or a list of names")
    values = [text(fields, item, (*path, index)) for index, item in enumerate(node.value)]
    return tuple(value for value in values if isinstance(value, str))


def duration(fields: Fields, node: Node, path: Path) -> float | Bad:
    """Read a duration in seconds."""
    if isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return float(node.value)
    seconds = parse_duration(node.value) if isinstance(node.value, str) else None
    if seconds is None:
        return fields.mismatch(node, path, "a duration such as 250ms, 30s, 10m, 1h30m or 2d, or a number of seconds")
    return seconds


def one_of(choices: Iterable[str]) -> Convert:
    """Return a reader for a choice of strings."""
    names = tuple(choices)

    def convert(fields: Fields, node: Node, path: Path) -> str | Bad:
        if node.value in names and isinstance(node.value, str):
            return node.value
        advice = did_you_mean(node.value, names) if isinstance(node.value, str) else ""
        return fields.problem(path, f"expected one of {', '.join(names)}, found {describe(node.plain())}.{advice}")

    return convert


# -- expressions


def condition(fields: Fields, node: Node, path: Path) -> str | Bad:
    """Read an expression, with or without `${}`. The result has no `${}`."""
    if isinstance(node.value, bool):
        return "true" if node.value else "false"
    if isinstance(node.value, str):
        return unwrap(node.value)
    return fields.mismatch(node, path, "an expression such as report.ok, or true or false")


def items(fields: Fields, node: Node, path: Path) -> str | Bad:
    """Read an expression for a list, or a literal list."""
    if isinstance(node.value, str):
        return unwrap(node.value)
    if isinstance(node.value, list):
        return _literal(fields, node, path)
    return fields.mismatch(node, path, "an expression such as discover.files, or a list")


def number_of_copies(fields: Fields, node: Node, path: Path) -> int | str | Bad:
    """Read an integer, or an expression for one."""
    if isinstance(node.value, str):
        return unwrap(node.value)
    if isinstance(node.value, int) and not isinstance(node.value, bool):
        return node.value
    return fields.mismatch(node, path, "a whole number, or an expression such as discover.count")


def _literal(fields: Fields, node: Node, path: Path) -> str | Bad:
    """Return plain data as a literal of the expression language."""
    if isinstance(node.value, list):
        parts = [_literal(fields, item, (*path, index)) for index, item in enumerate(node.value)]
        return f"[{', '.join(map(str, parts))}]" if BAD not in parts else BAD
    if isinstance(node.value, dict):
        return fields.mismatch(node, path, "a string, a number, true, false, null or a list")
    if isinstance(node.value, str) and unwrap(node.value) != node.value.strip():
        return f"({unwrap(node.value)})"
    return msgspec.json.encode(node.value).decode()


# -- keys


KINDS: Table = {
    "any": Field(anything, {}),
    "boolean": Field(boolean, {"type": "boolean"}),
    "condition": Field(condition, {"type": ["string", "boolean"]}),
    "copies": Field(number_of_copies, {"type": ["integer", "string"]}),
    "duration": Field(
        duration,
        {
            "description": "Such as 250ms, 30s, 10m, 1h30m or 2d, or a number of seconds.",
            "oneOf": [{"type": "number"}, {"type": "string", "pattern": rf"^\s*{DURATION.pattern}\s*$"}],
        },
    ),
    "integer": Field(integer, {"type": "integer"}),
    "items": Field(items, {"type": ["string", "array"]}),
    "name": Field(text, {"type": "string", "pattern": f"^{NAME.pattern}$"}),
    "object": Field(plain_object, {"type": "object"}),
    "text": Field(text, {"type": "string"}),
    "texts": Field(texts, {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
}
"""The field types of a definition, by the kind that `Key` names."""


def table_of(shape: type[msgspec.Struct], kinds: Table = KINDS, **own: Field) -> dict[str, Field]:
    """Return the keys that a struct declares. `own` has the fields of the kind `own`."""
    table = {}
    for field in msgspec.structs.fields(shape):
        key = next((item for item in getattr(field.type, "__metadata__", ()) if isinstance(item, Key)), None)
        if key is None:
            continue
        if key.kind == "choice":
            field_type = choice(get_args(field.type.__origin__))
        else:
            field_type = own[field.name] if key.kind == "own" else kinds[key.kind]
        described = {"description": key.doc} if key.doc else {}
        default = {"default": field.default} if isinstance(field.default, str) and field.default else {}
        table[field.encode_name] = Field(field_type.read, field_type.schema | key.rules | default | described)
    return table


def choice(values: Iterable[str]) -> Field:
    choices = list(values)
    return Field(one_of(choices), {"enum": choices})


def mapping_schema(table: Table, *, one_of: Iterable[str] = (), **rules: Any) -> Schema:
    """Return the schema of a mapping with known keys. Exactly one key of `one_of` is required."""
    either = {"oneOf": [{"required": [key]} for key in one_of]} if one_of else {}
    properties = {key: field.schema for key, field in table.items()}
    return {"type": "object", "additionalProperties": False, "properties": properties} | either | rules


_MAX_REPORTED = 50
_MAX_KEY_LENGTH = 128


def _follow(root: Node, path: Path) -> Iterator[tuple[Node, int]]:
    """Yield each node on a path, with its line, as far as the path exists."""
    node = root
    for key in path:
        if isinstance(node.value, dict) and key in node.value:
            entry = node.value[str(key)]
            node = entry.node
            yield node, entry.line if isinstance(node.value, (dict, list)) else node.line
        elif isinstance(node.value, list) and isinstance(key, int) and key < len(node.value):
            node = node.value[key]
            yield node, node.line
        elif isinstance(key, int):
            yield node, node.line  # a single item in place of a list
        else:
            return


def line_of(root: Node, path: Path) -> int:
    """Return the line of a path, or of its nearest existing ancestor."""
    line = root.line
    for _, line in _follow(root, path):  # noqa: B007
        pass
    return line


def holds(root: Node, path: Path) -> bool:
    """Return whether a path exists in a document."""
    return sum(1 for _ in _follow(root, path)) == len(path)


def problem_text(problem: Problem) -> str:
    """Return a problem as text. A trailing index is left out, because the message names the value."""
    path = problem.path[:-1] if problem.path and isinstance(problem.path[-1], int) else problem.path
    names = (f"[{key}]" if isinstance(key, int) else f".{_shortened_key(key)}" for key in path)
    name = "".join(names).removeprefix(".")
    return f"{name}: {problem.message}" if name else problem.message


def _shortened_key(key: str) -> str:
    return key if key.isprintable() and len(key) <= _MAX_KEY_LENGTH else shortened(key, _MAX_KEY_LENGTH)


def unreadable_text(source: str, flaws: Sequence[Flaw], expected: str) -> InvalidWorkflow:
    """Return the error for a text that cannot be parsed."""
    return refusal(_at_lines(source, flaws or [(1, f"expected {expected}, found nothing.")]))


def refuse(source: str, flaws: Iterable[Flaw], problems: Iterable[tuple[int, str]]) -> None:
    """Raise InvalidWorkflow with all problems of a text in order of lines, if there are any."""
    if lines := sorted([*flaws, *problems], key=lambda problem: problem[0]):
        raise refusal(_at_lines(source, lines))


def _at_lines(source: str, problems: Iterable[tuple[int, str]]) -> list[str]:
    return [f"{source}:{line}: {message}" for line, message in problems]


def refusal(lines: Iterable[str]) -> InvalidWorkflow:
    """Return an error with these lines, up to a readable number."""
    all_lines = list(lines)
    more = [f"… and {len(all_lines) - _MAX_REPORTED} more."] if len(all_lines) > _MAX_REPORTED else []
    return InvalidWorkflow("\n".join(all_lines[:_MAX_REPORTED] + more))
