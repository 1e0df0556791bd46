"""Plain functions, named `module:function` or `file.py:function`, that the worker's operator has allowed.

A name comes over the network, so nothing is imported that `--allow` does not cover: a module and what is below it, one
file, or every file in a folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.errors import InvalidTask
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.options import CallOptions
from orchestrator.sdk.signature import Signature
from orchestrator.sdk.task import Task

ANYTHING = "*:*"
"""Published with the names that a worker knows: it has an allowed folder, so only trying tells what it finds there."""


class Allowed:
    """What one worker may import by name."""

    def __init__(self, app: Orchestrator, allow: Sequence[str]) -> None:
        self._app = app
        self._folders = [Path(entry).resolve() for entry in allow if Path(entry).is_dir()]
        self._files = [Path(entry).resolve() for entry in allow if entry.endswith(".py")]
        self._modules = [entry for entry in allow if not entry.endswith(".py") and not Path(entry).is_dir()]
        self._found: dict[str, Task[..., Any]] = {}

    @property
    def patterns(self) -> list[str]:
        """What to publish beside the registered names."""
        return [ANYTHING] if self._folders or self._files or self._modules else []

    def find(self, name: str) -> Task[..., Any] | None:
        """Return the function of that name as a task, or None if it is not allowed or not there."""
        if ":" not in name:
            return None
        if name not in self._found:
            try:
                task = self._load(name)
            except Exception as error:  # noqa: BLE001  # whatever the import raises is the failure of the task
                return _as_task(self._app, name, _raising(error))
            if task is None:
                return None
            self._found[name] = task
        return self._found[name]

    def _load(self, name: str) -> Task[..., Any] | None:
        place, _, attribute = name.partition(":")
        if place.endswith(".py"):
            path = self._allowed_file(place)
            module = None if path is None else _load_file(path)
        else:
            module = importlib.import_module(place) if self._allows_module(place) else None
        function = getattr(module, attribute, None)
        if isinstance(function, Task):
            return function
        if not inspect.isfunction(function):
            return None
        return _as_task(self._app, name, function)

    def _allowed_file(self, place: str) -> Path | None:
        candidates = [folder / place for folder in self._folders] + [file for file in self._files if file.name == place]
        for candidate in candidates:
            path = candidate.resolve()
            inside = any(path.is_relative_to(folder) for folder in self._folders)
            if path.is_file() and (inside or path in self._files):
                return path
        return None

    def _allows_module(self, place: str) -> bool:
        if any(place == module or place.startswith(f"{module}.") for module in self._modules):
            return True
        top = place.split(".")[0]
        return any((folder / f"{top}.py").is_file() or (folder / top).is_dir() for folder in self._folders)


def _load_file(path: Path) -> Any:
    specification = importlib.util.spec_from_file_location(f"orchestrator_file_{path.stem}", path)
    if specification is None or specification.loader is None:
        raise InvalidTask(f"{path} cannot be imported.")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def _raising(error: Exception) -> Callable[..., Any]:
    def fail(**_: Any) -> None:
        raise error

    return fail


def _as_task(app: Orchestrator, name: str, function: Callable[..., Any]) -> Task[..., Any]:
    return Task(app, name, function, CallOptions(), Signature(name, function))
