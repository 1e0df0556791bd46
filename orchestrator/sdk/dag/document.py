"""Read a YAML document into a tree of nodes with line numbers.

The dialect is YAML 1.2, as in editors: `on`, `yes` and `no` are strings, dates are strings, and JSON is valid YAML. The
tree is built from parser events with our own stack, so that depth, aliases and duplicate keys are limited and reported
here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.dag.operators import fits
from orchestrator.domain.durations import format_duration
from orchestrator.errors import InvalidWorkflow

MAX_LENGTH = 10_000_000
"""The maximum length of a document in characters."""
DEEPEST = 64
"""The maximum nesting depth of a document."""
MAX_NODES = 1_000_000
"""The maximum number of nodes in a document; each alias counts as the nodes that it stands for."""

Scalar = None | bool | int | float | str
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Node:
    """A node: a scalar, a list of nodes, or a mapping of entries by key."""

    __slots__ = ("line", "size", "value")

    def __init__(self, value: Scalar | list[Node] | dict[str, Entry], line: int = 0, size: int = 1) -> None:
        self.value = value
        self.line = line
        """The line, from 1; 0 if the node does not come from a text."""
        self.size = size

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {key: entry.node.plain() for key, entry in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


class Entry(NamedTuple):
    """An entry of a mapping: the line of its key, and its value."""

    line: int
    node: Node


class Flaw(NamedTuple):
    """An error in a document."""

    line: int
    message: str


def text_of(path: str | Path) -> str:
    """Return the text of a file, or raise InvalidWorkflow."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidWorkflow(f"{path}: cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise InvalidWorkflow(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}.") from None


def read(text: str) -> tuple[Node | None, list[Flaw]]:
    """Parse the single document of a text. Return its root and errors; the root is None if the text is unreadable."""
    if len(text) > MAX_LENGTH:
        return None, [Flaw(1, f"{len(text):,} characters, and at most {MAX_LENGTH:,} are allowed.")]
    builder = _Builder()
    try:
        for event in yaml.parse(_json_as_yaml(text), Loader=_Loader):
            builder.take(event)
    except _Unreadable as error:
        return None, [*builder.flaws, error.flaw]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        return None, [*builder.flaws, Flaw(mark.line + 1 if mark else 1, _syntax(error))]
    except (yaml.YAMLError, UnicodeError) as error:
        position = getattr(error, "position", None) or 0
        return None, [
            *builder.flaws,
            Flaw(text.count("\n", 0, position) + 1, f"not readable as YAML: {' '.join(str(error).split())}."),
        ]
    return builder.root, builder.flaws


_JSON_STRING = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?')


def _json_as_yaml(text: str) -> str:
    """Return a JSON document with the same lines as YAML, and any other text as it is.

    YAML lacks JSON's pairs of surrogates, unescaped characters such as U+007F, and keys of over 1,024 characters.
    """
    try:
        if not text.lstrip().startswith(("{", "[")):
            return text
        json.loads(text)
    except (ValueError, RecursionError):
        return text

    def rewritten(string: re.Match[str]) -> str:
        value = json.loads(string[1]).encode("unicode_escape").decode().replace('"', r"\"")
        return f'"{value}"' if string[2] is None else f'? "{value}"{string[2]}'

    return _JSON_STRING.sub(rewritten, text)


def from_plain(value: Any, depth: int = 0) -> Node:
    """Return plain data as a tree without lines, or raise InvalidWorkflow."""
    if depth > DEEPEST:
        raise InvalidWorkflow(f"nested more than {DEEPEST} levels deep.")
    if isinstance(value, Mapping):
        return Node({str(key): Entry(0, from_plain(item, depth + 1)) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return Node([from_plain(item, depth + 1) for item in value])
    if isinstance(value, timedelta):
        return Node(value.total_seconds())
    if isinstance(value, (int, float)) and not fits(value):
        raise InvalidWorkflow(_NOT_A_NUMBER.format("a number in it"))
    if isinstance(value, str) and "\0" in value:
        raise InvalidWorkflow(_NO_NUL)
    return Node(value)


_NOT_A_NUMBER = "{} is not a finite number of at most 64 bits."
_NO_NUL = "a string cannot contain the character \\0."


# -- scalars


_NULL = re.compile(r"(?:~|null|Null|NULL)?")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
NOT_A_STRING = re.compile(
    "|".join(p.pattern for p in (_TRUE, _FALSE, _OCTAL, _HEXADECIMAL, _FLOAT, _NOT_FINITE, _INTEGER))
    + "|~|null|Null|NULL"
)
"""Unquoted strings that YAML reads as another type."""


def scalar(text: str) -> Scalar:
    """Return the value of an unquoted string. A number that is too large becomes infinite."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text) or _FALSE.fullmatch(text):
        return text[0] in "tT"
    if _INTEGER.fullmatch(text):
        return int(text) if len(text) <= 21 else math.inf
    if _OCTAL.fullmatch(text) or _HEXADECIMAL.fullmatch(text):
        return int(text, 0) if len(text) <= 24 else math.inf
    if _NOT_FINITE.fullmatch(text):
        return math.inf
    return float(text) if _FLOAT.fullmatch(text) else text


# -- building


class _Unreadable(Exception):
    def __init__(self, line: int, message: str) -> None:
        self.flaw = Flaw(line, message)


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end the parser has not reached."""

    line: int
    anchor: str | None
    items: list[Node] | None
    entries: dict[str, Entry] = field(default_factory=dict)
    key: tuple[str, int] | None = None
    merged: list[Node] = field(default_factory=list)
    size: int = 1


class _Builder:
    def __init__(self) -> None:
        self.root: Node | None = None
        self.flaws: list[Flaw] = []
        self._stack: list[_Open] = []
        self._anchors: dict[str, Node | None] = {}

    def take(self, event: yaml.Event) -> None:
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.ScalarEvent):
            self._take_scalar(event, line)
        elif isinstance(event, (yaml.SequenceStartEvent, yaml.MappingStartEvent)):
            self._open(event, line)
        elif isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
            self._close()
        elif isinstance(event, yaml.AliasEvent):
            self._take_alias(event, line)
        elif isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            raise _Unreadable(line, "a second document: a file holds one workflow.")

    def _take_scalar(self, event: yaml.ScalarEvent, line: int) -> None:
        top = self._stack[-1] if self._stack else None
        if top is not None and top.items is None and top.key is None:
            top.key = (event.value, line)
            if event.value in top.entries:
                first = top.entries[event.value].line
                self.flaws.append(Flaw(line, f"duplicate key {event.value!r}, first used in line {first}."))
            return
        tag = (event.tag or "").removeprefix("tag:yaml.org,2002:")
        if tag not in ("", "!", "str", "int", "float", "bool", "null"):
            raise _Unreadable(line, f"tag {event.tag!r} is not allowed: a workflow is plain data.")
        is_text = bool(event.style) or tag in ("!", "str")
        value = event.value if is_text else scalar(event.value)
        if isinstance(value, (int, float)) and not fits(value):
            self.flaws.append(Flaw(line, _NOT_A_NUMBER.format(event.value[:40])))
            value = 0
        if isinstance(value, str) and "\0" in value:
            self.flaws.append(Flaw(line, _NO_NUL))
        self._add(Node(value, line), event.anchor)

    def _take_alias(self, event: yaml.AliasEvent, line: int) -> None:
        if event.anchor not in self._anchors:
            raise _Unreadable(line, f"no anchor &{event.anchor} is defined before this alias.")
        node = self._anchors[event.anchor]
        if node is None:
            raise _Unreadable(line, f"alias *{event.anchor} is used inside its own anchor.")
        self._add(node, None)

    def _open(self, event: yaml.SequenceStartEvent | yaml.MappingStartEvent, line: int) -> None:
        if event.tag not in (None, "!", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"):
            raise _Unreadable(line, f"tag {event.tag!r} is not allowed: a workflow is plain data.")
        if len(self._stack) >= DEEPEST:
            raise _Unreadable(line, f"nested more than {DEEPEST} levels deep.")
        if event.anchor:
            self._anchors[event.anchor] = None
        self._stack.append(_Open(line, event.anchor, [] if isinstance(event, yaml.SequenceStartEvent) else None))

    def _close(self) -> None:
        container = self._stack.pop()
        if container.items is not None:
            self._add(Node(container.items, container.line, container.size), container.anchor)
            return
        for node in container.merged:
            for mapping in node.value if isinstance(node.value, list) else [node]:
                if not isinstance(mapping.value, dict):
                    self.flaws.append(Flaw(mapping.line, "<< takes a mapping or a list of mappings."))
                    continue
                for key, entry in mapping.value.items():
                    container.entries.setdefault(key, entry)
        self._add(Node(container.entries, container.line, container.size), container.anchor)

    def _add(self, node: Node, anchor: str | None) -> None:
        if anchor:
            self._anchors[anchor] = node
        if not self._stack:
            self.root = node
            return
        top = self._stack[-1]
        top.size += node.size
        if top.size > MAX_NODES:
            raise _Unreadable(
                top.line, f"more than {MAX_NODES:,} parts, each alias counted with all that it refers to."
            )
        if top.items is not None:
            top.items.append(node)
        elif top.key is None:
            raise _Unreadable(node.line, "a key must be a string.")
        else:
            key, line = top.key
            top.key = None
            if key == "<<":
                top.merged.append(node)
            else:
                top.entries.setdefault(key, Entry(line, node))


def _syntax(error: yaml.MarkedYAMLError) -> str:
    context = f" {error.context}" if error.context else ""
    return f"not readable as YAML: {error.problem}{context}."


def to_data(definition: Definition, *, registered: bool = False) -> dict[str, Any]:
    """Return a definition as data, structured like a file. `registered` adds the copied task options."""
    data: dict[str, Any] = msgspec.to_builtins(definition)
    steps = data.pop("steps", [])
    for part in () if registered else (*steps, *data.get("on_failure", ()), *data.get("on_success", ())):
        part.pop("registered", None)
    for part in (data, data.get("schedule", {}), *steps):
        for key in ("timeout", "every", "jitter"):
            if part.get(key) is not None:
                part[key] = format_duration(part[key])
    data["tasks"] = {step.pop("name"): step for step in steps}
    return data


def to_yaml(definition: Definition, *, registered: bool = False) -> str:
    """Return a definition as a YAML file. `registered` adds the copied task options, which files lack."""
    data = to_data(definition, registered=registered)
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)
    return text


def compared(stored: Definition | None, new: Definition) -> tuple[str, str]:
    """Return two definitions as texts, which are equal if applying the second would change nothing."""
    if stored is None:
        return "", _comparable(new)
    if new.version is None:  # the stored version number was assigned automatically
        stored = msgspec.structs.replace(stored, version=None)
    return _comparable(stored), _comparable(new)


def _comparable(definition: Definition) -> str:
    """Return a definition as text with sorted mappings, because the database does not keep their order."""
    ordered = msgspec.json.decode(msgspec.json.encode(definition, order="deterministic"), type=Definition)
    return to_yaml(ordered, registered=True)


class _Dumper(yaml.SafeDumper):
    """Quotes strings that YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver("!not-a-string", re.compile(rf"(?:{NOT_A_STRING.pattern})\Z"), None)
