"""The OpenAPI document, the help of all commands and the signatures of all public names match the golden files.

After an intended change, `python -m tests.unit.test_golden` rewrites the files. The difference is reviewed.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import orchestrator
import orchestrator.executors
import orchestrator.testing
from orchestrator.api import openapi
from orchestrator.api.routes import ROUTES
from orchestrator.cli import main

FOLDER = Path(__file__).parent.parent / "golden"


def api() -> str:
    """Return the document with one operation or schema per line."""
    document = openapi.document(ROUTES)
    operations = [
        f"{method.upper()} {path} {json.dumps(_brief(operation), sort_keys=True)}"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = [
        f"{name} {json.dumps(schema, sort_keys=True)}" for name, schema in document["components"]["schemas"].items()
    ]
    return "\n".join([*sorted(operations), *sorted(schemas), ""])


def _brief(operation: dict[str, Any]) -> dict[str, Any]:
    """Return an operation with only the codes of its problems, whose schema is always the same."""
    responses = operation["responses"]
    good = {code: response for code, response in responses.items() if code < "400"}
    return operation | {"responses": good, "problems": sorted(set(responses) - set(good))}


def helps() -> str:
    """Return the help of every command."""
    return "\n".join(
        _helps(main, click.Context(main, info_name="orchestrator", terminal_width=100, **main.context_settings))
    )


def _helps(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"$ {context.command_path} --help\n{command.get_help(context)}\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _helps(below, click.Context(below, parent=context, info_name=name, terminal_width=100))


def names() -> str:
    """Return every public name of the modules that users import, with its signature or its fields."""
    lines: list[str] = []
    for module in (orchestrator, orchestrator.workflow, orchestrator.executors, orchestrator.testing):
        for name in module.__all__:
            lines += _described(f"{module.__name__}.{name}", getattr(module, name))
    return "\n".join([*sorted(lines), ""])


def _described(path: str, value: Any) -> Iterator[str]:
    """Yield a line for a name, and for each public member of a class that is not inherited from Python's classes."""
    if not inspect.isclass(value):
        yield path + (_signature(value) if callable(value) else "")
        return
    ours = [base for base in value.__mro__ if base.__module__.startswith("orchestrator")]
    yield f"{path}{_signature(value)}"
    members = {name for base in ours for name in (*vars(base), *inspect.get_annotations(base))}
    for name in members:
        if not name.startswith("_"):
            member = inspect.getattr_static(value, name, None)
            function = getattr(value, name, None) if not isinstance(member, property) else None
            yield f"{path}.{name}{_signature(function) if inspect.isroutine(function) else ''}"


def _signature(value: Callable[..., Any]) -> str:
    """Return the names, kinds and defaults of the parameters, without their types, which type checkers compare."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):  # of a builtin
        return ""
    if "client" in found.parameters:  # users receive such objects, and create none
        return ""
    bare = [part.replace(annotation=inspect.Parameter.empty) for part in found.parameters.values()]
    return re.sub(" at 0x[0-9a-f]+", "", str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty)))


FILES = {"openapi.txt": api, "commands.txt": helps, "names.txt": names}


@pytest.mark.parametrize("name", FILES)
def test_the_public_interface_matches_its_golden_file(name: str) -> None:
    assert FILES[name]() == (FOLDER / name).read_text(), "if this is meant: python -m tests.unit.test_golden"


if __name__ == "__main__":
    for name, content in FILES.items():
        (FOLDER / name).write_text(content())
