"""Load the application that `module:app` names, and plain functions that the worker's operator has allowed."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from orchestrator.domain.tasks.destinations import Destinations, parse_destinations
from orchestrator.errors import ConfigurationError, GiveUp, InvalidTask, did_you_mean
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.modules import ImportFailed, describe_import_error
from orchestrator.sdk.tasks.options import CallOptions
from orchestrator.sdk.tasks.signature import Signature
from orchestrator.sdk.tasks.task import Task

if TYPE_CHECKING:
    from orchestrator.workers.executors.asking import Endpoint, Request


def load_app(path: str) -> Orchestrator:
    """Import the application, with the modules that it includes. The current folder is importable."""
    app = _find_app(path)
    app.load_modules()
    return app


def _find_app(path: str) -> Orchestrator:
    module_name, _, attribute = path.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if module_name.endswith(".py") or "/" in module_name:
        raise ConfigurationError(
            f"An application is given as module:app, not as a file; found {path!r}.{_suggest(module_name, attribute)}"
        )
    if not module_name or module_name.startswith("."):  # a relative import has no package here
        raise ConfigurationError(f"An application is given as module:app, e.g. tasks:app; found {path!r}.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigurationError(
                f"There is no module {module_name!r} to find the application in.{_suggest_nearby(module_name)} "
                f"Looked in {folder} and the installed packages."
            ) from error
        raise broken(path, error) from error
    except (Exception, SystemExit) as error:
        raise broken(path, error) from error
    apps = _applications(module)
    if attribute:
        app = _as_app(getattr(module, attribute, None))
        if app is not None:
            return app
        inner = _suggest(f"{module_name}.celery", attribute) if hasattr(module, "__path__") else ""
        hint = inner or did_you_mean(attribute, apps) or (f" It has: {', '.join(apps)}." if apps else _NO_APPS)
        raise ConfigurationError(f"{attribute!r} in module {module_name!r} is not an Orchestrator.{hint}")
    if len({id(app) for app in apps.values()}) != 1:
        several = f" Name one: {', '.join(f'{module_name}:{name}' for name in apps)}." if apps else _NO_APPS
        raise ConfigurationError(f"Module {module_name!r} holds {len(apps)} applications.{several}")
    return next(iter(apps.values()))


_NO_APPS = " The module has none: create one with app = Orchestrator()."


def _applications(module: ModuleType) -> dict[str, Orchestrator]:
    candidates = ((name, _as_app(value)) for name, value in vars(module).items())
    return {name: app for name, app in candidates if app is not None}


def _as_app(value: object) -> Orchestrator | None:
    """Return an application, or the one inside an object of a compatible API (`orchestrator.compat`)."""
    if isinstance(value, Orchestrator) or not hasattr(type(value), "__orchestrator__"):
        return value if isinstance(value, Orchestrator) else None
    below: Orchestrator = value.__orchestrator__  # type: ignore[attr-defined]
    return below


def _suggest(file: str, attribute: str) -> str:
    """Return ` Did you mean 'x:app'?` if the module of this file has an application."""
    name = file.removesuffix(".py").removeprefix("./").replace("/", ".")
    try:
        apps = _applications(importlib.import_module(name))
    except (Exception, SystemExit):  # noqa: BLE001  # only the hint is lost
        return ""
    found = attribute if attribute in apps else next(iter(apps), None)
    return f" Did you mean '{name}:{found}'?" if found else ""


def _suggest_nearby(module: str) -> str:
    """Return ` Did you mean 'x'?` if a module with a similar name exists beside the missing one."""
    package, _, _ = module.rpartition(".")
    prefix = f"{package}." if package else ""
    with suppress(OSError, ValueError):  # the name is no valid file name
        siblings = (Path.cwd() / package.replace(".", "/")).glob("*.py")
        return did_you_mean(module, [f"{prefix}{path.stem}" for path in siblings if path.stem != "__init__"])
    return ""


def broken(where: str, error: BaseException) -> ImportFailed:
    """Return the error for an application whose module failed to import."""
    return ImportFailed(f"The application {where} cannot be loaded. {describe_import_error(error)}")


# -- plain functions, named `module:function` or `file.py:function`, that the worker's operator has allowed
#
# A name comes over the network, so only code that `--allow` covers is imported: a module and its submodules, one file,
# or every file in a folder except virtual environments and installed packages. The real path decides where a file lies.
# Only public functions defined in the module itself may be named: a module that imports `subprocess.check_output` does
# not offer it.

ANYTHING = "*:*"
"""Announced by a worker with allowed code: the leader cannot know which functions exist there."""
_INSTALLED = ("site-packages", "dist-packages", "node_modules")
_ENVIRONMENT_MARKERS = ("pyvenv.cfg", "conda-meta")
_PYTHON_FOLDERS = frozenset(
    Path(path).resolve()
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)


class Allowed:
    """The functions that a worker may import by name."""

    def __init__(self, app: Orchestrator, allow: Sequence[str]) -> None:
        self._app = app
        self._folders = [Path(entry).resolve() for entry in allow if Path(entry).is_dir()]
        self._files = [Path(entry).resolve() for entry in allow if entry.endswith(".py")]
        self._modules = [entry for entry in allow if not entry.endswith(".py") and not Path(entry).is_dir()]
        self._found: dict[str, Task[..., Any]] = {}

    @property
    def patterns(self) -> list[str]:
        """Names to announce in addition to the registered tasks."""
        return [ANYTHING] if self._folders or self._files or self._modules else []

    def find(self, name: str) -> Task[..., Any] | None:
        """Return the function of that name as a task, or None if it is not allowed or does not exist."""
        if ":" not in name:
            return None
        if name not in self._found:
            try:
                task = self._load(name)
            except Exception as error:  # noqa: BLE001  # an error of the import is the failure of the task
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
        """Return the function or task of that name, or None if it is not allowed or does not exist."""
        location, _, attribute = name.partition(":")
        if not attribute.isidentifier() or attribute.startswith("_"):
            return None
        module = self._load_file(location) if location.endswith(".py") else self._load_module(location)
        found = None if module is None else vars(module).get(attribute)
        function = found.function if isinstance(found, Task) else found
        if module is None or not inspect.isfunction(function) or function.__module__ != module.__name__:
            return None
        return found

    def _load_file(self, file_name: str) -> ModuleType | None:
        candidates = [folder / file_name for folder in self._folders]
        candidates += [file for file in self._files if file.name == file_name or file == Path(file_name).resolve()]
        for candidate in candidates:
            path = candidate.resolve()
            if path.is_file() and (path in self._files or self._covers(path)):
                return _execute(path)
        return None

    def _load_module(self, name: str) -> ModuleType | None:
        if not all(part.isidentifier() for part in name.split(".")):
            return None
        if any(name == module or name.startswith(f"{module}.") for module in self._modules):
            module = importlib.import_module(name)
            return module if module.__name__ == name else None
        origin = _origin(name)
        if origin is None or not self._covers(origin):
            return None
        module = importlib.import_module(name)
        file = getattr(module, "__file__", None)
        return module if module.__name__ == name and file is not None and Path(file).resolve() == origin else None

    def _covers(self, path: Path) -> bool:
        """Return whether a real path lies in an allowed folder, outside of installed packages."""
        return any(path.is_relative_to(folder) and _is_own(path, folder) for folder in self._folders)


def _is_own(path: Path, folder: Path) -> bool:
    """Return whether a file is in no hidden folder, environment or installed package below `folder`."""
    inner: Iterable[Path] = (parent for parent in path.parents if parent != folder and parent.is_relative_to(folder))
    return not any(
        parent.name.startswith(".")
        or parent.name in _INSTALLED
        or parent in _PYTHON_FOLDERS
        or any((parent / marker).exists() for marker in _ENVIRONMENT_MARKERS)
        for parent in inner
    )


def _origin(module: str) -> Path | None:
    """Return the real path of a module's file, without importing anything."""
    top, *inner = module.split(".")
    loaded = sys.modules.get(top)
    spec = importlib.util.find_spec(top) if loaded is None else getattr(loaded, "__spec__", None)
    if spec is None:
        return None
    file = spec.origin if spec.has_location else None
    folders = list(spec.submodule_search_locations or ())
    for part in inner:
        paths = [Path(folder, part) for folder in folders]
        files = [
            file for path in paths for file in (path / "__init__.py", path.with_name(f"{part}.py")) if file.is_file()
        ]
        file = str(files[0]) if files else None
        if file is None:
            folders = [str(path) for path in paths if path.is_dir()]  # a namespace package has no file
        else:
            folders = [str(files[0].parent)] if files[0].name == "__init__.py" else []
    return None if file is None else Path(file).resolve()


def _execute(path: Path) -> ModuleType:
    """Import a file that need not be on `sys.path`."""
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


# -- webhooks: post JSON to an address that a workflow gives
#
# The request is sent like those of executors (`workers/executors/asking.py`): resolve the name once, check each of its
# addresses, and connect to an allowed one. Redirects are not followed. Proxies of the environment are not used, because
# they would resolve the name again.

_TIMEOUT = 30.0
_PORTS = {"http": 80, "https": 443}
_UNQUOTED = "!#$%&'()*+,/:;=?@[]~"
"""Characters of a path and query that stay as they are; all others are quoted."""


class WebhookFailed(Exception):
    """The receiver did not accept a webhook."""


def install(app: Orchestrator) -> None:
    """Register the task that posts webhooks. Every worker has it."""
    destinations = parse_destinations(app.settings.webhooks, app.settings.webhook_allow)

    @app.task(name="orchestrator.webhook")
    def webhook(url: str, body: Any) -> int:
        return post(url, body, destinations)


def post(url: str, body: Any, destinations: Destinations) -> int:
    """Post JSON and return the status of the response. A status other than 2xx is a failure, which is retried."""
    from orchestrator.workers.executors import asking  # imported late: without h11 a process starts sooner

    if destinations.mode == "off":
        raise GiveUp("Webhooks are disabled for this worker (setting webhooks).")
    host, port, is_secure, path = _parse(url)
    try:
        data = json.dumps(body, default=str, allow_nan=False).encode()
    except ValueError as error:
        raise GiveUp(f"The body of the webhook is sent as JSON, which has no NaN and no infinity: {error}.") from None
    try:
        address, request = asking.Endpoint(host, port, is_secure, ""), asking.Request("POST", path, data)
        status = asyncio.run(_status(address, request, destinations))
    except asking.Barred as error:
        raise GiveUp(f"The webhook is not sent: {error}. The worker's operator can allow it.") from None
    except asking.Unanswered as error:
        if isinstance(error.__cause__, UnicodeError):
            raise GiveUp("The host of the webhook cannot be resolved.") from None
        raise WebhookFailed(f"{error}.") from error
    except asking.Unreadable as error:
        raise WebhookFailed(f"{error}.") from error
    except TimeoutError as error:
        raise WebhookFailed(f"{host} did not answer within {_TIMEOUT:g} s.") from error
    if not 200 <= status < 300:
        remark = " Redirects are not followed: use the final address." if 300 <= status < 400 else ""
        raise WebhookFailed(f"{host} answered with status {status}, expected 2xx.{remark}")
    return status


async def _status(address: Endpoint, request: Request, destinations: Destinations) -> int:
    from orchestrator.workers.executors import asking

    async with asyncio.timeout(_TIMEOUT), asking.open_response(address, request, allowed=destinations) as incoming:
        return incoming.head.status


def _parse(url: str) -> tuple[str, int, bool, str]:
    """Split an address. Error messages leave it out, because it may contain a secret."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise GiveUp("The address of the webhook is not valid.") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise GiveUp(f"A webhook needs an http or https address; found one with {parts.scheme[:20] or 'no scheme'!r}.")
    if parts.username is not None or parts.password is not None:
        raise GiveUp("The address of a webhook cannot hold a user or password: put a token into its path or its body.")
    path = quote(parts.path or "/", safe=_UNQUOTED) + (f"?{quote(parts.query, safe=_UNQUOTED)}" if parts.query else "")
    return parts.hostname, port or _PORTS[parts.scheme], parts.scheme == "https", path
