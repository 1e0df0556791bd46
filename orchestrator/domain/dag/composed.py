"""Compositions of tasks (`chain`, `group`, `chord`) as definitions of DAGs.

The shape of a composition is a definition: its tasks, their options, and which result goes where. It is stored once,
under a name that is made of its content. The arguments are the parameter `args` of a run: MessagePack as text, so that
they keep their types. A composition in a fan-out is a child run; its parameter `previous` is what it is given by the
part before. The parameter `result` has only a default: the template of what the run comes to.
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
"""With which the names of these definitions begin, and no others."""
ARGS, PREVIOUS, RESULT = "args", "previous", "result"
BY_PLACE = "*"
"""In the input of a step: the positional arguments of its task."""
_DIGITS = 32


def is_composed(workflow: str | None) -> bool:
    """Say whether a workflow is the shape of a composition."""
    return workflow is not None and workflow.startswith(PREFIX)


def named(definition: Definition) -> Definition:
    """Return a definition under the name that is made of its content."""
    anonymous = msgspec.structs.replace(definition, name=PREFIX, version=None)
    return msgspec.structs.replace(definition, name=PREFIX + content_hash(anonymous)[:_DIGITS], version=1)


def check_composed(definition: Definition) -> None:
    """Refuse what is not made of calls alone, or has the name of another content: who may enqueue may store these."""
    plain = Definition(name="", description=definition.description, params=definition.params, steps=definition.steps)
    calls_alone = all(step.task is not None or is_composed(step.workflow) for step in definition.steps)
    if named(plain) != definition or not calls_alone:
        raise InvalidWorkflow(
            f"Composition {definition.name!r:.200}: expected calls of tasks, under the name that follows from them."
        )


def result_template(definition: Definition) -> Template | None:
    """Return what a run of a composition comes to; None if it is a run of another definition."""
    if not is_composed(definition.name):
        return None
    return parse_template(definition.params.get(RESULT, Param(default=None)).default)


def child_id(run: bytes, step: str, position: int, retried: int = 0) -> bytes:
    """Return the id of the run at a position of a step; one that is created after retries has another."""
    return derived_id(run, "run", step, position, *((retried,) if retried else ()))


def packed(encoded: bytes) -> str:
    """Return encoded arguments as a parameter."""
    return base64.b64encode(encoded).decode()


def opened(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a composition's run as the expressions of its steps see them."""
    return {
        name: timezones.decode(base64.b64decode(text)) if name in (ARGS, PREVIOUS) and text else text
        for name, text in params.items()
    }


def given_to_child(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a step gives to the run of a composition as its parameters."""
    return {name: packed(timezones.encode(value)) for name, value in given.items()}
