"""`orchestrator run-task`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from orchestrator.cli.terminal.options import app_option, log_options, require_app
from orchestrator.environment import hide_environment
from orchestrator.errors import ConfigurationError, OrchestratorError
from orchestrator.settings import load_settings
from orchestrator.telemetry import configure_logging
from orchestrator.terminal_safe import without_password
from orchestrator.workers.container import (
    TEMPORARY,
    UNUSABLE,
    Board,
    Folder,
    Specification,
    folder_of,
    run,
    split,
)
from orchestrator.workers.functions import load_app


@click.command("run-task", context_settings={"show_default": True})
@click.argument("function", required=False, metavar="[MODULE:FUNCTION]")
@app_option
@log_options
def command(function: str | None, app: str | None, log_level: str | None, log_format: str | None) -> None:
    """Run one task, and end: the command of a container that an executor starts.

    What to do stands in the file or at the address that TASK_SPEC_PATH names, or in the variable TASK_SPEC. The
    function is the one that is named, or the task of the application. Its result is the last line that is printed.

    Where TASK_OUTPUT_PATH names a folder or an address, status.json stands there from the start, with a heartbeat every
    ten seconds, and output.json at the end; without it, beside a specification that is an address.

    Exit codes: 0, it is done; 1, it failed; 75, the specification or the place for the output cannot be reached; 78,
    the specification or the function cannot be used; 143, it was told to end (SIGTERM).

    \b
    Example:
      TASK_SPEC='{"input": {"data": [1, 2, 6]}}' orchestrator run-task statistics:mean
    """
    try:
        settings = load_settings(app=app, log_level=log_level, log_format=log_format)
        configure_logging(settings.log_level, settings.log_format)
        hide_environment()
        specification = _specification()
        place = _place()
        call = _function(function, specification) if function else _task(require_app(settings), specification)
    except _Away as error:
        raise _Unreached(str(error)) from error
    except OrchestratorError as error:
        raise _Unusable(str(error)) from error
    try:
        code = run(call, Board(place, specification))
    except Exception as error:
        where = "" if place is None else place.name
        raise _Unreached(f"The place for the output, {where}, cannot be used: {error}") from error
    sys.exit(code)


class _Away(Exception):
    """Something cannot be reached now."""


class _Unreached(click.ClickException):
    exit_code = TEMPORARY


class _Unusable(click.ClickException):
    exit_code = UNUSABLE


def _specification() -> Specification:
    path, text = os.environ.get("TASK_SPEC_PATH", ""), os.environ.get("TASK_SPEC", "")
    if not path and not text:
        raise ConfigurationError(
            "Neither TASK_SPEC_PATH nor TASK_SPEC says what there is to do. Executors set one of them; by hand: "
            """TASK_SPEC='{"input": {}}'"""
        )
    try:
        if path:
            folder, file = split(path)
            data = folder_of(folder).read(file)
        else:
            data = text.encode()
    except FileNotFoundError:
        raise ConfigurationError(f"There is nothing at {without_password(path)}, which TASK_SPEC_PATH names.") from None
    except OrchestratorError:
        raise
    except Exception as error:
        raise _Away(f"The specification at {without_password(path)} cannot be read: {error}") from error
    try:
        return msgspec.json.decode(data, type=Specification)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        where = f"at {without_password(path)}" if path else "in TASK_SPEC"
        raise ConfigurationError(f"The specification {where} is not what an executor writes: {error}.") from None


def _place() -> Folder | None:
    path = os.environ.get("TASK_OUTPUT_PATH", "")
    if path:
        return folder_of(path.rstrip("/") or "/")
    specified = os.environ.get("TASK_SPEC_PATH", "")
    return folder_of(split(specified)[0]) if "://" in specified else None


def _function(path: str, specification: Specification) -> Callable[[], Any]:
    module, _, name = path.partition(":")
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"There is no function {path!r} (module:function): {error}.") from None
    return partial(found, *specification.arguments, **specification.input)


def _task(app: str, specification: Specification) -> Callable[[], Any]:
    application = load_app(app)
    application._resources.start()
    task = application.find_task(specification.task)
    arguments, keywords = task._signature.restore(specification.arguments, specification.input)
    return partial(task, *arguments, **keywords)
