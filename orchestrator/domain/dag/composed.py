"""Compositions of tasks (`chain`, `group`, `chord`) as definitions of DAGs.

A composition's shape is a definition: its tasks, their options, and where each result goes. It is stored once, under a
name derived from its content. The arguments are the run's parameter `args`: MessagePack as base64 text, so that they
keep their types. A composition in a fan-out is a child run; its parameter `previous` is the result of the part before.
The default of the parameter `result` is a template for the run's result.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import msgspec

from orchestrator.domain import timezones
from orchestrator.domain.dag.definition import Definition, Param, content_hash
from orchestrator.domain.dag.expression import Template, parse_template
from orchestrator.domain.ids import derived_id
from orchestrator.errors import InvalidWorkflow

PREFIX = "composed:"
"""The prefix of the names of compositions. No other name starts with it."""
ARGS, PREVIOUS, RESULT = "args", "previous", "result"
POSITIONAL = "*"
"""The key of the positional arguments in the input of a step."""
_DIGITS = 32


def is_composed(workflow: str | None) -> bool:
    """Return whether a workflow is a composition."""
    return workflow is not None and workflow.startswith(PREFIX)


def named(definition: Definition) -> Definition:
    """Return a definition with the name derived from its content."""
    anonymous = msgspec.structs.replace(definition, name=PREFIX, version=None)
    return msgspec.structs.replace(definition, name=PREFIX + content_hash(anonymous)[:_DIGITS], version=1)


def check_composed(definition: Definition) -> None:
    """Reject definitions with other steps than calls, or a wrong name: anyone who may enqueue may store these."""
    plain = Definition(name="", description=definition.description, params=definition.params, steps=definition.steps)
    has_only_calls = all(step.task is not None or is_composed(step.workflow) for step in definition.steps)
    if named(plain) != definition or not has_only_calls:
        raise InvalidWorkflow(
            f"Composition {definition.name!r:.200}: expected calls of tasks, and the name derived from them."
        )


def result_template(definition: Definition) -> Template | None:
    """Return the template for the result of a composition's run, or None for another workflow."""
    if not is_composed(definition.name):
        return None
    return parse_template(definition.params.get(RESULT, Param(default=None)).default)


def child_id(run: bytes, step: str, position: int, retried: int = 0) -> bytes:
    """Return the id of the child run at a position of a step. A child created by a retry gets a different id."""
    return derived_id(run, "run", step, position, *((retried,) if retried else ()))


def packed(encoded: bytes) -> str:
    """Return encoded arguments as the text of a parameter."""
    return base64.b64encode(encoded).decode()


def decoded_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a composition's run, decoded for the expressions of its steps."""
    return {
        name: timezones.decode(base64.b64decode(text)) if name in (ARGS, PREVIOUS) and text else text
        for name, text in params.items()
    }


def child_params(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a step passes to a child composition as parameters."""
    return {name: packed(timezones.encode(value)) for name, value in values.items()}
