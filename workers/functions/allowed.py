"""Plain functions, named `module:function` or `file.py:function`, that the worker's operator has allowed.

A name comes over the network, so nothing is imported that `--allow` does not cover: a module and what is below it, one
file, or every file in a folder but those of virtual environments and installed packages. The real path decides where a
file lies. Only public functions that are defined there may be named: a module that has imported
`subprocess.check_output` does not offer it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from orchestrator.errors import InvalidTask
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.tasks.options import CallOptions
from orchestrator.sdk.tasks.signature import Signature
from orchestrator.sdk.tasks.task import Task

ANYTHING = "*:*"
"""Announced by a worker with an allowed folder: the functions there must be tried."""
_INSTALLED = ("site-packages", "dist-packages", "node_modules")
_MARKS_OF_AN_ENVIRONMENT = ("pyvenv.cfg", "conda-meta")
_OF_PYTHON = frozenset(
    Path(path).resolve()
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)


class Allowed:
    """The functions that one worker may import by name."""

    def __init__(self, app: Orchestrator, allow: Sequence[str]) -> None:
        self._app = app
        self._folders = [Path(entry).resolve() for entry in allow if Path(entry).is_dir()]
        self._files = [Path(entry).resolve() for entry in allow if entry.endswith(".py")]
        self._modules = [entry for entry in allow if not entry.endswith(".py") and not Path(entry).is_dir()]
        self._found: dict[str, Task[..., Any]] = {}

    @property
    def patterns(self) -> list[str]:
        """Names to announce beside the registered ones."""
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
        found = self._function(name)
        if found is None or isinstance(found, Task):
            return found
        return _as_task(self._app, name, self._app._adapted(found, self._function))

    def _function(self, name: str) -> Any:
        """Return the function or task of that name, if it is allowed and there."""
        place, _, attribute = name.partition(":")
        if not attribute.isidentifier() or attribute.startswith("_"):
            return None
        module = self._load_file(place) if place.endswith(".py") else self._load_module(place)
        found = None if module is None else vars(module).get(attribute)
        function = found.function if isinstance(found, Task) else found
        if module is None or not inspect.isfunction(function) or function.__module__ != module.__name__:
            return None
        return found

    def _load_file(self, place: str) -> ModuleType | None:
        candidates = [folder / place for folder in self._folders]
        candidates += [file for file in self._files if file.name == place or file == Path(place).resolve()]
        for candidate in candidates:
            path = candidate.resolve()
            if path.is_file() and (path in self._files or self._covers(path)):
                return _execute(path)
        return None

    def _load_module(self, place: str) -> ModuleType | None:
        if not all(part.isidentifier() for part in place.split(".")):
            return None
        if any(place == module or place.startswith(f"{module}.") for module in self._modules):
            module = importlib.import_module(place)
            return module if module.__name__ == place else None
        origin = _origin(place)
        if origin is None or not self._covers(origin):
            return None
        module = importlib.import_module(place)
        file = getattr(module, "__file__", None)
        return module if module.__name__ == place and file is not None and Path(file).resolve() == origin else None

    def _covers(self, path: Path) -> bool:
        """Say whether a real path lies in an allowed folder, and in nothing that was installed below it."""
        return any(path.is_relative_to(folder) and _is_own(path, folder) for folder in self._folders)


def _is_own(path: Path, folder: Path) -> bool:
    """Say whether a file below a folder is of the project: in no hidden folder, environment or installed package."""
    inner: Iterable[Path] = (parent for parent in path.parents if parent != folder and parent.is_relative_to(folder))
    return not any(
        parent.name.startswith(".")
        or parent.name in _INSTALLED
        or parent in _OF_PYTHON
        or any((parent / mark).exists() for mark in _MARKS_OF_AN_ENVIRONMENT)
        for parent in inner
    )


def _origin(place: str) -> Path | None:
    """Return the real path of the file that a module would be imported from; nothing is imported to find it."""
    top, *inner = place.split(".")
    loaded = sys.modules.get(top)
    spec = importlib.util.find_spec(top) if loaded is None else getattr(loaded, "__spec__", None)
    if spec is None:
        return None
    file = spec.origin if spec.has_location else None
    folders = list(spec.submodule_search_locations or ())
    for part in inner:
        found = [Path(folder, part) for folder in folders]
        files = [
            file for path in found for file in (path / "__init__.py", path.with_name(f"{part}.py")) if file.is_file()
        ]
        file = str(files[0]) if files else None
        if file is None:
            folders = [str(path) for path in found if path.is_dir()]  # a package without a file of its own
        else:
            folders = [str(files[0].parent)] if files[0].name == "__init__.py" else []
    return None if file is None else Path(file).resolve()


def _execute(path: Path) -> ModuleType:
    """Import a file that need not be on Python's path."""
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
    return Task(app._client, name, function, CallOptions(), Signature(name, function))
