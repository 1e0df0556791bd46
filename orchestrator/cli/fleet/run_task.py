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
    """Run one task and exit: the command of a container that an executor starts.

    The specification is the file or URL in TASK_SPEC_PATH, or the text in TASK_SPEC. The function is the argument, or
    the specification's task in the application. Its result is the last line of the output.

    If TASK_OUTPUT_PATH names a folder or URL, status.json is written there with a heartbeat every ten seconds, and
    output.json at the end. Otherwise they are written beside a specification that is a URL.

    Exit codes: 0, success; 1, the task failed; 75, the specification or the output folder cannot be reached; 78, the
    specification or the function cannot be used; 143, terminated by SIGTERM.

    \b
    Example:
      TASK_SPEC='{"input": {"data": [1, 2, 6]}}' orchestrator run-task statistics:mean
    """
    try:
        settings = load_settings(app=app, log_level=log_level, log_format=log_format)
        configure_logging(settings.log_level, settings.log_format)
        hide_environment()
        specification = _specification()
        output_folder = _output_folder()
        call = _function(function, specification) if function else _task(require_app(settings), specification)
    except _CannotReach as error:
        raise _Unreachable(str(error)) from error
    except OrchestratorError as error:
        raise _Unusable(str(error)) from error
    try:
        code = run(call, Board(output_folder, specification))
    except Exception as error:
        folder_name = "" if output_folder is None else output_folder.name
        raise _Unreachable(f"The output folder {folder_name} cannot be used: {error}") from error
    sys.exit(code)


class _CannotReach(Exception):
    """The specification cannot be read at the moment."""


class _Unreachable(click.ClickException):
    exit_code = TEMPORARY


class _Unusable(click.ClickException):
    exit_code = UNUSABLE


def _specification() -> Specification:
    path, text = os.environ.get("TASK_SPEC_PATH", ""), os.environ.get("TASK_SPEC", "")
    if not path and not text:
        raise ConfigurationError(
            "Neither TASK_SPEC_PATH nor TASK_SPEC is set. Executors set one of them; to run by hand: "
            """TASK_SPEC='{"input": {}}'"""
        )
    try:
        if path:
            folder, file = split(path)
            data = folder_of(folder).read(file)
        else:
            data = text.encode()
    except FileNotFoundError:
        raise ConfigurationError(f"There is no file {without_password(path)}, which TASK_SPEC_PATH names.") from None
    except OrchestratorError:
        raise
    except Exception as error:
        raise _CannotReach(f"The specification at {without_password(path)} cannot be read: {error}") from error
    try:
        return msgspec.json.decode(data, type=Specification)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        where = f"at {without_password(path)}" if path else "in TASK_SPEC"
        raise ConfigurationError(f"The specification {where} is not a valid task specification: {error}.") from None


def _output_folder() -> Folder | None:
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
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"There is no function {path!r} (module:function): {error}.") from None
    return partial(function, *specification.arguments, **specification.input)


def _task(app: str, specification: Specification) -> Callable[[], Any]:
    application = load_app(app)
    application._resources.start()
    task = application.find_task(specification.task)
    arguments, keywords = task._signature.restore(specification.arguments, specification.input)
    return partial(task, *arguments, **keywords)
