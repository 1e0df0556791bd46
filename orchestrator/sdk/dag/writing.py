"""Workflow definitions written as files, for people and to be compared."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import yaml

from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.durations import format_duration
from orchestrator.sdk.dag.document import NOT_A_STRING


def to_data(definition: Definition, *, registered: bool = False) -> dict[str, Any]:
    """Return a definition as a file has it, as data; with `registered`, also what the file cannot say."""
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
    """Return a definition as a file that would give it again; with `registered`, also what the file cannot say."""
    data = to_data(definition, registered=registered)
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)
    return text


def compared(stored: Definition | None, given: Definition) -> tuple[str, str]:
    """Return two definitions as texts that are equal where applying the second would change nothing."""
    if stored is None:
        return "", _comparable(given)
    if given.version is None:  # then the version of the other is not of its author's making
        stored = msgspec.structs.replace(stored, version=None)
    return _comparable(stored), _comparable(given)


def _comparable(definition: Definition) -> str:
    """Return a definition with its mappings in order of their keys: the database does not keep theirs."""
    ordered = msgspec.json.decode(msgspec.json.encode(definition, order="deterministic"), type=Definition)
    return to_yaml(ordered, registered=True)


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or 1.2 would take for something other than a string."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver("!not-a-string", re.compile(rf"(?:{NOT_A_STRING.pattern})\Z"), None)
